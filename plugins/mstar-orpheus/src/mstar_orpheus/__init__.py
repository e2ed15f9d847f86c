"""Orpheus speech: text in, streamed 24 kHz speech out. Nothing is imported here, so that listing stays light."""
