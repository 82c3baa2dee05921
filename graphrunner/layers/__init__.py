"""Owns: the building blocks models are written in.
May import: attention, kvcache, kernels, weights, core.
Must not contain: architectures, scheduling."""
