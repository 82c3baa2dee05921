"""Owns: HOW a forward is recorded and replayed.
May import: device, config, telemetry, core.
Must not contain: runners, models."""
