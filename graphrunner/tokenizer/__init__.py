"""Owns: text to ids and back: tokenizer, chat template, incremental detokenization, stop strings.
May import: weights (GGUF metadata only), config, telemetry, core.
Must not contain: torch, devices, requests, scheduling."""
