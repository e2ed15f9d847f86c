"""Other hosts of a deployment: their agents, the processes there, reserved devices, loss and replacement."""
