"""Checkpoint in, block by block, quantized checkpoint out; killed at any moment, it goes on where it was."""
