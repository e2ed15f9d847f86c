"""Conversation of `mstarctl chat`: reading lines, commands, requests and the display of answers."""
