"""Qwen3-TTS for mstarctl: text in, streamed 24 kHz speech out, in preset, described or cloned voices."""
