"""Tensors in the shared memory of processes of other hosts: served and fetched by TCP with CURVE."""
