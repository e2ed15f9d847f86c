"""Realtime conversations: items, sound, turns and responses of a session. Used by /v1/realtime."""
