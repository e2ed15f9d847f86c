"""Pi0.5: camera images, state and an instruction in, robot actions out. Nothing is imported here, so that listing stays light."""
