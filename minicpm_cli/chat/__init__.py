"""A conversation in the terminal."""
