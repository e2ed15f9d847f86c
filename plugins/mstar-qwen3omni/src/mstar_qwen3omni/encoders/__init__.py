"""Sound, images and videos to vectors of the thinker's width."""
