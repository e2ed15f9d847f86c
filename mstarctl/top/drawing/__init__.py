"""Styled lines of cells, glyphs, bars, themes and pictures. Pure functions."""
