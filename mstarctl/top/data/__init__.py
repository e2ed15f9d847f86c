"""Data of the screens: frames of the watch, recordings, history, calls of the admin socket. No Textual."""
