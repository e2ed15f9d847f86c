"""Widgets of `top`. Only these and the app import Textual."""
