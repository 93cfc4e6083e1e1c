"""Measurements that a user can repeat: speed, start time, and the same work done by transformers."""
