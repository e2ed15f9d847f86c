"""Realtime sessions over WebRTC: sound by tracks, events by a data channel. Calls need `mstarctl[webrtc]`."""
