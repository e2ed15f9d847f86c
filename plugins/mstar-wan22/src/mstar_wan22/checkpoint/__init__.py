"""Layout of a checkpoint: sizes from its configs, and loading of its tensors."""
