"""How many KV pages fit."""

from __future__ import annotations

import torch

from graphrunner.config.engine_config import CacheConfig, SchedulerConfig
from graphrunner.core.errors import ConfigError

MIB = 1 << 20


def plan_num_pages(
    cache: CacheConfig, scheduler: SchedulerConfig, bytes_per_page: int, device: torch.device, reserved_bytes: int = 0
) -> int:
    """Pages for the pool, the dummy page included.

    Args:
        bytes_per_page: of all layers together.
        reserved_bytes: device memory that graphs and activations still need.

    Raises:
        ConfigError: not even one page fits.
    """
    if cache.num_pages is not None:
        return cache.num_pages
    pages_per_request = -(-scheduler.max_model_len // cache.page_size)
    most_useful = scheduler.max_num_seqs * pages_per_request + 1
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        budget = int(total_bytes * cache.gpu_memory_utilization) - (total_bytes - free_bytes) - reserved_bytes
    else:
        budget = cache.cpu_kv_cache_mib * MIB
    fitting = budget // bytes_per_page
    if fitting < 2:
        name = "gpu_memory_utilization" if device.type == "cuda" else "cpu_kv_cache_mib"
        problem = f"leaves {max(budget, 0) // MIB} MiB for KV pages of {bytes_per_page} bytes"
        raise ConfigError(name, getattr(cache, name), problem)
    return min(fitting, most_useful)
