"""Run MiniCPM language models from a terminal: chat, pipelines, batch files."""

__version__ = "0.8.0"
