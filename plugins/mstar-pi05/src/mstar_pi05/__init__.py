"""Pi0.5: camera images, state and an instruction in, actions out. Imports nothing, so that listing models is fast."""
