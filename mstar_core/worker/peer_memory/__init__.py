"""Tensors between workers: within one host from GPU to GPU without a copy on the host, between hosts by Mooncake."""
