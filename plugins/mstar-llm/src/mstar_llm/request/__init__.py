"""From a conversation to ids, and from ids to text."""
