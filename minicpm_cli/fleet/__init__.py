"""Several engines as one language model: a process for each, requests to whoever has room."""
