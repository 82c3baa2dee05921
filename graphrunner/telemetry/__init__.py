"""Owns: logging, metrics, the step trace.
May import: core.
Must not contain: torch, engine state."""
