"""Reading of a request: prompt, image and the table of denoise steps. No torch."""
