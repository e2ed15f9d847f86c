"""Training of `qwen3_tts:mini`. See README.md."""
