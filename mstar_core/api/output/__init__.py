"""Outputs of requests: queues, encoding, audio and number formats, usage."""
