"""Files of prompts in, files of answers out: every row exactly once, whatever happens in between."""
