"""Admin socket: HTTP and JSON over a unix socket, served on the supervisor's loop."""
