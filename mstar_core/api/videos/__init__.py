"""Videos as jobs: /v1/videos, their rows and files, and their generation without clients."""
