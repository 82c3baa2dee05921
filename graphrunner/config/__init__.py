"""Owns: frozen dataclasses of settings, one a section; the only reader of the environment; texts in the user's cache.
May import: core.
Must not contain: torch, policy, anything resolved later than start-up."""
