"""Owns: Triton kernels of the GPU path, their typed launchers, tuned configurations and the dispatch surface gpu_ops.
May import: kernels (twins, noise), device, config, core.
Must not contain: model code, scheduling, anything that imports triton when no kernel is asked for."""
