"""Owns: which requests compute how many tokens in the next step.
May import: kvcache (host half), config, telemetry, core.
Must not contain: torch, device work."""
