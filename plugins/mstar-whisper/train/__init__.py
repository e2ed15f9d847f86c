"""Training of `whisper:mini`. See README.md."""
