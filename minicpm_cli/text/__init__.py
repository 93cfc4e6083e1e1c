"""Text on both sides of the engine: tokenizers, chat templates, and tokens back to text."""
