"""Sampling of token ids from logits."""
