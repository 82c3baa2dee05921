"""Owns: `graphrunner bench`: offline, latency, graphs, and the load generator for any OpenAI endpoint.
May import: everything; what is slow to import only inside the command that needs it.
Must not contain: device work, engine logic."""
