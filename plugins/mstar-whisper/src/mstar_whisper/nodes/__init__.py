"""Modules of the nodes: spectrogram, encoder, decoder, and the transcript of a window."""
