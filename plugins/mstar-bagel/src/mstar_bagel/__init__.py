"""BAGEL: text and images in any order, in and out. Nothing is imported here, so that listing stays light."""
