"""The dialect of OpenAI's Realtime API: its events and fields, and their meaning for a conversation."""
