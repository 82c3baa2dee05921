"""Owns: sampler, penalties, logprobs, structured output, rejection, pooling.
May import: kernels, device, config, core.
Must not contain: models, runners."""
