"""Sound of a realtime session: formats, resampling, the input buffer and the detection of turns."""
