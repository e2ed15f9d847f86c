"""Streams between the walks of a request, on the consumer's and on the producer's rank."""
