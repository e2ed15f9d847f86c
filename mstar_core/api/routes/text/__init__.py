"""Routes of prompts without a conversation: completions, embeddings and tokens."""
