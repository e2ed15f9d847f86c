"""Training of `llm:mini`: a made world, one training command, and a judge."""
