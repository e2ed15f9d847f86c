"""Wan 2.2 as a plugin of mstarctl: text and images to video."""
