"""Voice conversations of `mstarctl talk`: microphone, playback, turns, display, and the session over /v1/realtime."""
