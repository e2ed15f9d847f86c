"""Qwen3-Omni: text, images, audio and video in, text and speech out. Nothing is imported here: listing stays light."""
