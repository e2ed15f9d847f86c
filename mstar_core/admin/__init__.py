"""The admin socket's server: HTTP and JSON over a unix socket, served inside the supervisor's loop."""
