"""The Python SDK: speaks to the admin socket and to the api, to nothing else. No torch."""
