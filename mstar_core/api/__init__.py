"""The api process: serves HTTP and exchanges messages with the other processes. Imports nothing eagerly."""
