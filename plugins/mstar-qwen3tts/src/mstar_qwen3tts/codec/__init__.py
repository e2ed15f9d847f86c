"""Node `Codec`: frames of codes to sound, with state between the pieces of a stream."""
