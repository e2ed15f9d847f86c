"""V-JEPA 2: video in, features and predicted features out. Nothing is imported here, so that listing stays light."""
