"""Conversations: turns, tools, and how a model's template writes thinking and tool calls."""
