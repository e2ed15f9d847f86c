"""The api process: HTTP in front, messages behind. Started by the supervisor; imports nothing until asked."""
