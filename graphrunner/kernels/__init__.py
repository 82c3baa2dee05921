"""Owns: the fused operations of a forward pass, one kernel set a device, each with a plain-torch twin.
May import: distributed, device, config, telemetry, core.
Must not contain: models, attention backends, caches; anything that allocates more than its outputs per step.
"""
