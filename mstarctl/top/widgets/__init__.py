"""The few widgets of `top`. Only these, the app and its sheets know textual."""
