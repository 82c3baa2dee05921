"""Configurations measured on real cards; made by `python benchmarks/kernels.py --tune`, see linear_tuning.py."""

# key: see linear_config.config_key. Row: kind, block_n, block_k, slices, num_warps, num_stages,
# programs_per_multiprocessor, trigger.
TUNED_LINEAR: dict[str, tuple[str | int, ...]] = {
    "sm90x132/16bit/plain/4096x1024/rows1": ("vector", 8, 512, 1, 4, 3, 2, 1),
    "sm90x132/16bit/plain/4096x1024/rows8": ("mma", 16, 256, 4, 4, 6, 2, 1),
    "sm90x132/16bit/plain/4096x1024/rows16": ("mma", 32, 64, 4, 4, 4, 2, 1),
    "sm90x132/16bit/residual/1024x2048/rows1": ("vector", 4, 2048, 1, 4, 3, 3, 1),
    "sm90x132/16bit/residual/1024x2048/rows8": ("mma", 16, 256, 8, 8, 3, 2, 1),
    "sm90x132/16bit/residual/1024x2048/rows16": ("mma", 16, 256, 8, 8, 3, 2, 1),
    "sm90x132/16bit/gated/3072x1024/rows1": ("vector", 4, 512, 1, 4, 4, 2, 1),
    "sm90x132/16bit/gated/3072x1024/rows8": ("mma", 16, 256, 4, 4, 3, 2, 1),
}

# key: see decode_attention.attention_key. Row: programs per multiprocessor (sets the splits), block_n, num_warps,
# num_stages.
TUNED_ATTENTION: dict[str, tuple[int, int, int, int]] = {}
