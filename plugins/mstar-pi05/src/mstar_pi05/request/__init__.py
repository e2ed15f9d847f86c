"""Request inputs: images, uploads, prompt and tokenizer. Used by the processor; no torch."""
