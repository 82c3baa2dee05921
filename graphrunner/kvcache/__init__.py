"""Owns: page allocator and radix prefix cache (host); KV pools (device).
May import: device, kernels, config, core.
Must not contain: scheduling policy; torch in the host half."""
