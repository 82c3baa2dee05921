"""Owns: sampler, penalties, logprobs, structured output, rejection.
May import: kernels, device, config, core.
Must not contain: models, runners."""
