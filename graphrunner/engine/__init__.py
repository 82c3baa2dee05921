"""Owns: the step, the model runner, memory plan and the one file that wires.
May import: everything but entrypoints.
Must not contain: HTTP, command lines."""
