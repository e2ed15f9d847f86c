"""Checkpoint configs, tensor names, weights and tokenizers."""
