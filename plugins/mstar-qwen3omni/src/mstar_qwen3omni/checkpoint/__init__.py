"""Files of a Qwen3-Omni checkpoint: sizes, weights, the generated miniature and the download."""
