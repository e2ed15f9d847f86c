"""Life cycle of a process of a deployment: its link to the supervisor, logs and failures. No torch, no sockets."""
