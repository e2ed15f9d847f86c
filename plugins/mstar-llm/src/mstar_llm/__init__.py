"""Plain language models: one decoder, driven by the config.json of the checkpoint."""
