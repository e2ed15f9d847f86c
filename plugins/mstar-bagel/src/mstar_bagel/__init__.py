"""BAGEL: text and images in any order, in and out. Imports nothing, so that listing models is fast."""
