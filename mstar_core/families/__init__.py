"""Parts that several model families share: spectrograms, tokenizers and language names. Imported by plugins."""
