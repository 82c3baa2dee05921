"""Owns: WHAT goes into one forward: runners, static buffers, capture sizes, select_runner.
May import: execution, attention, kvcache, device, config, telemetry, core.
Must not contain: models, layers, sampling, scheduler."""
