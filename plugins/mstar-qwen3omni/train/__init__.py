"""Training of `qwen3_omni:mini`. See README.md in this folder."""
