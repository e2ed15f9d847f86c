"""The SNAC vocoder: the node, its PyTorch decoder, and its kernels."""
