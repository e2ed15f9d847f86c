"""Whisper: speech to text, translation and timestamps, for recordings of any length."""
