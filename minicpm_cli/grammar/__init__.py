"""Structured output: a JSON schema or a regular expression as a mask of the tokens that may come next."""
