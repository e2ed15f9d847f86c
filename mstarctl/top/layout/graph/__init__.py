"""The graph of a deployment: its screen, and the geometry of its drawing."""
