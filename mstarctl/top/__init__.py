"""`mstarctl top`: a live view of one deployment in the terminal. Only `app` and what it imports load textual."""
