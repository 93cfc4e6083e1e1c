"""The engine for programs: HTTP in OpenAI's shapes over one engine loop. FastAPI is imported only when it serves."""
