"""Owns each request's life: programs, routing, the end. No tensors."""
