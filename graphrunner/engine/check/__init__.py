"""Owns: the graph check: every replay beside an eager run, with everything that must not be read poisoned.
May import: what engine may.
Must not contain: anything that runs when the check is off."""
