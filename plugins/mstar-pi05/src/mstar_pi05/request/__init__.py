"""Request inputs: images, uploads and the prompt. Used by the processor; no torch."""
