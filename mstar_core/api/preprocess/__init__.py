"""Preprocessing: the process pool that runs the model's processor, and the inline path."""
