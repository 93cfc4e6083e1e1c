"""The model family as one decoder: configuration, layers, cache and weights."""
