"""Owns: logging, metrics, the step trace.
May import: config, core.
Must not contain: torch, engine state."""
