"""Processes of the gateway: the keeper, which owns sockets and lock, and the worker, which serves."""
