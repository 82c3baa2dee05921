"""Owns: what a device is: streams, events, memory, the graph object.
May import: core, config, telemetry.
Must not contain: model or runner knowledge."""
