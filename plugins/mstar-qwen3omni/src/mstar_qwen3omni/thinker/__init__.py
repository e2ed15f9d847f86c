"""The thinker: the text model that reads all inputs."""
