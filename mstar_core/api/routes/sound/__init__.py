"""Routes that send sound, and the voices that they speak in."""
