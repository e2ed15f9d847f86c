"""Tensors between GPU workers of one host: from device memory to device memory, without a copy on the host."""
