"""Training of the miniature `orpheus:mini`: data, codec, language model, export and judge. Not part of the package."""
