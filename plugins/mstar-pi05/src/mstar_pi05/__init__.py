"""Pi0.5: cameras, state and an instruction in, actions out. Nothing is imported here: listing stays light."""
