"""Owns: the engine core as a process of its own: messages, the loop inside it, starting and stopping it, its death.
May import: engine, telemetry, config, core.
Must not contain: HTTP, tokenizing, anything of entrypoints.openai."""
