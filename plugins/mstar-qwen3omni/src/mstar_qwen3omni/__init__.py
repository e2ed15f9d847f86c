"""Qwen3-Omni: text, images, audio and video in, text and speech out. Imports nothing, to keep listing models fast."""
