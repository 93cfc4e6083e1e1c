"""From prompts of token ids to token events: who runs when, in which pages, and which token is drawn."""
