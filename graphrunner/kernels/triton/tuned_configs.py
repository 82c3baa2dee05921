"""Configurations measured on real cards; made by `python benchmarks/kernels.py --tune`, see linear_tuning.py."""

# key: see linear_config.config_key. Row: kind, block_n, block_k, slices, num_warps, num_stages,
# programs_per_multiprocessor, trigger, block_b, ahead_bytes.
TUNED_LINEAR: dict[str, tuple[str | int, ...]] = {
    "sm90x132/16bit/argmax/128256x2048/rows1": ("vector", 4, 2048, 1, 4, 3, 3, 1),
    "sm90x132/16bit/argmax/128256x4096/rows1": ("vector", 4, 512, 1, 8, 3, 2, 0),
    "sm90x132/16bit/argmax/151936x1024/rows1": ("vector", 8, 512, 1, 4, 3, 3, 1),
    "sm90x132/16bit/gated/14336x4096/rows1": ("vector", 2, 512, 1, 8, 3, 2, 1),
    "sm90x132/16bit/gated/3072x1024/rows1": ("vector", 4, 512, 1, 4, 4, 2, 1),
    "sm90x132/16bit/gated/8192x2048/rows1": ("vector", 2, 512, 1, 4, 3, 3, 1),
    "sm90x132/16bit/plain/3072x2048/rows1": ("vector", 4, 2048, 1, 4, 4, 2, 1),
    "sm90x132/16bit/plain/4096x1024/rows1": ("vector", 8, 512, 1, 4, 3, 2, 1),
    "sm90x132/16bit/plain/6144x4096/rows1": ("vector", 2, 2048, 1, 4, 3, 3, 1),
    "sm90x132/16bit/residual/1024x2048/rows1": ("vector", 4, 2048, 1, 4, 3, 3, 1),
    "sm90x132/16bit/residual/1024x3072/rows1": ("vector", 2, 1024, 1, 4, 4, 2, 1),
    "sm90x132/16bit/residual/2048x2048/rows1": ("vector", 8, 2048, 1, 8, 3, 2, 1),
    "sm90x132/16bit/residual/2048x8192/rows1": ("vector", 1, 2048, 1, 4, 3, 3, 1),
    "sm90x132/16bit/residual/4096x14336/rows1": ("vector", 1, 2048, 1, 8, 3, 2, 1),
    "sm90x132/16bit/residual/4096x4096/rows1": ("vector", 4, 512, 1, 8, 3, 2, 1),
}

# key: see decode_attention.attention_key. Row: programs per multiprocessor (sets the splits), block_n, num_warps,
# num_stages.
TUNED_ATTENTION: dict[str, tuple[int, int, int, int]] = {
    "sm90x132/16bit/8x128/requests1": (2, 32, 2, 2),
    "sm90x132/16bit/8x128/requests16": (2, 64, 2, 5),
    "sm90x132/16bit/8x128/requests256": (1, 64, 2, 2),
    "sm90x132/16bit/8x128/requests64": (1, 32, 2, 5),
    "sm90x132/16bit/8x64/requests1": (1, 64, 2, 2),
    "sm90x132/16bit/8x64/requests16": (1, 128, 4, 5),
    "sm90x132/16bit/8x64/requests256": (1, 64, 2, 5),
    "sm90x132/16bit/8x64/requests64": (1, 64, 2, 5),
}
