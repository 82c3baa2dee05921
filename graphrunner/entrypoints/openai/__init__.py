"""Owns: the OpenAI protocol over HTTP, the seam to an engine (EngineClient), admission, and server start and stop.
May import: everything.
Must not contain: device work, scheduling, command lines."""
