"""Owns: LLM (offline), the CLI, the OpenAI server.
May import: everything.
Must not contain: device work, scheduling."""
