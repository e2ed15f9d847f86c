"""The operator's tool: command line over the admin socket, the api and the installed plugins."""
