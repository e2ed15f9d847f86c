"""Requests: chat layout, tokenizer, positions, and media as inputs of the encoders. Used by the processor."""
