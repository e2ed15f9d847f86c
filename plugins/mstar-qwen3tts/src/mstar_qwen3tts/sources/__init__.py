"""Sources of checkpoints: the hub, and the generated `qwen3_tts:tiny`."""
