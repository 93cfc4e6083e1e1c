"""Structured output: a JSON schema or a regular expression as a mask of the tokens that may come next (llguidance).

A token costs 5 to 35 us for its mask and 3 us to take in, on one core of a Xeon for the demo's 49,152 tokens (medians),
10 to 110 us for 130,560; a schema 1 to 20 ms once, and 50 us for each answer; the tokenizer 0.1 s for the first one.
"""
