"""Records of one step of a KV node, shared by its scheduler, its runner, CUDA graphs and attention."""
