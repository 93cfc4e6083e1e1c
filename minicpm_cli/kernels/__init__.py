"""Tensor operations in pairs: a plain-torch reference, and what a device runs faster."""
