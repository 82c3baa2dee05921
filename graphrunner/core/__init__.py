"""Owns: plain data that crosses layers (requests, batches, keys, outputs, errors).
May import: the standard library.
Must not contain: torch at run time, device work, policy."""
