"""Orpheus speech: text in, streamed 24 kHz speech out. Imports nothing, so that listing models is fast."""
