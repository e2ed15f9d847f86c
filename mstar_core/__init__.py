"""The serving runtime: graphs of components, and the processes that walk requests through them."""

__version__ = "0.1.0"
