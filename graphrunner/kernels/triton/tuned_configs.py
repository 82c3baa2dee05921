"""Configurations measured on real cards; made by `python benchmarks/kernels.py --tune`, see linear_tuning.py."""

# key: see linear_config.config_key. Row: kind, block_n, block_k, slices, num_warps, num_stages,
# programs_per_multiprocessor, trigger.
TUNED_LINEAR: dict[str, tuple[str | int, ...]] = {}

# key: see decode_attention.attention_key. Row: programs per multiprocessor (sets the splits), block_n, num_warps,
# num_stages.
TUNED_ATTENTION: dict[str, tuple[int, int, int, int]] = {}
