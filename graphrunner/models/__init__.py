"""Owns: one file an architecture, Hugging Face checkpoint names.
May import: layers, attention, kernels, weights, core.
Must not contain: runners, scheduling, sampling."""
