"""The Responses API: requests, conversations of items, events, stored and background responses."""
