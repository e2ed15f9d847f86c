"""Records of a step that the scheduler, the runner, captured steps and attention share. They hold no torch modules."""
