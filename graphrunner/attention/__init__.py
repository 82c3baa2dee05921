"""Owns: AttentionBackend and its implementations.
May import: kvcache, kernels, device, config, core.
Must not contain: model files, runners."""
