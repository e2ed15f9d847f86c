"""Tensors of other processes on their way into a worker."""
