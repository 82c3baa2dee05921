"""Owns: finding a model and reading its checkpoint (safetensors, GGUF, random) under Hugging Face names.
May import: kernels, distributed, device, config, telemetry, core.
Must not contain: layers, models, sharding policy of a layer, anything after loading."""
