"""Owns: proposers of draft tokens, how many are worth verifying, what became of them.
May import: runner, execution, sampling, models, attention, kvcache, kernels, device, telemetry, config, core.
Must not contain: scheduling, acceptance inside a forward (sampling), concrete target models."""
