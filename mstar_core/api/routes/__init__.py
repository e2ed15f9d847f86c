"""Route handlers, one module per route or group of related routes."""
