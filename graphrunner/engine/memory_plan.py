"""How many KV pages fit. Numbers in, numbers out; who measured them is no matter here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphrunner.config.engine_config import CacheConfig, SchedulerConfig
from graphrunner.core.errors import ConfigError

MIB = 1 << 20

_NUM_KEPT_CONTEXTS = 8
"""With a prefix cache, room for this many times what can run at once: more would mostly lengthen the page lists."""
_LATE_BYTES = 256 * MIB
"""For what a device loads at first use, later than any measurement: code of kernels, workspaces of libraries."""
GRAPH_BYTES = 4 * MIB
"""What the driver keeps for one recording of a whole forward, roughly."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What was measured once weights are loaded and graphs recorded.

    Attributes:
        total_bytes: of the device.
        used_bytes: by anyone: weights, graphs, other processes, and the pages that have memory already.
        committed_bytes: of which by those pages.
        activation_bytes: what the largest step needs on top while it runs.
    """

    total_bytes: int
    used_bytes: int
    committed_bytes: int
    activation_bytes: int


def most_useful_pages(cache: CacheConfig, scheduler: SchedulerConfig) -> int:
    """More pages than this, the dummy page included, would serve nobody."""
    pages_per_request = -(-scheduler.max_model_len // cache.page_size)
    num_contexts = scheduler.max_num_seqs * (_NUM_KEPT_CONTEXTS if cache.enable_prefix_caching else 1)
    return num_contexts * pages_per_request + 1


def page_capacity(cache: CacheConfig, scheduler: SchedulerConfig, bytes_per_page: int, total_bytes: int) -> int:
    """Pages to reserve addresses for, before it is known how many fit; `num_pages` as the user set it."""
    if cache.num_pages is not None:
        return cache.num_pages
    return max(2, min(most_useful_pages(cache, scheduler), total_bytes // bytes_per_page))


def plan_device_pages(cache: CacheConfig, memory: DeviceMemory, fitting_pages: Callable[[int], int]) -> int:
    """Pages, the dummy page included, that keep the device's use under `gpu_memory_utilization` in the largest step.

    Args:
        fitting_pages: of a budget in bytes; see `KVPool.fitting_pages`.

    Raises:
        ConfigError: fewer than two pages fit, or fewer than the user wants. The message has every number.
    """
    limit = int(memory.total_bytes * cache.gpu_memory_utilization)
    budget = limit - (memory.used_bytes - memory.committed_bytes) - memory.activation_bytes - _LATE_BYTES
    fitting = fitting_pages(max(budget, 0))
    wanted = 2 if cache.num_pages is None else cache.num_pages
    if fitting < wanted:
        used = (memory.used_bytes - memory.committed_bytes) // MIB
        step = (memory.activation_bytes + _LATE_BYTES) // MIB
        name = "gpu_memory_utilization" if cache.num_pages is None else "num_pages"
        raise ConfigError(
            name,
            getattr(cache, name),
            f"{limit // MIB} of the device's {memory.total_bytes // MIB} MiB may be used; weights, graphs and others "
            f"have {used}, a step needs {step}: {max(budget, 0) // MIB} MiB are left for KV pages, not enough for "
            f"{wanted}",
        )
    return fitting if cache.num_pages is None else cache.num_pages


def plan_host_pages(cache: CacheConfig, scheduler: SchedulerConfig, bytes_per_page: int) -> int:
    """Pages on a CPU: they become real as they are first written, so this is only a limit.

    Raises:
        ConfigError: `cpu_kv_cache_mib` holds not even two.
    """
    if cache.num_pages is not None:
        return cache.num_pages
    budget = cache.cpu_kv_cache_mib * MIB
    fitting = budget // bytes_per_page
    if fitting < 2:
        problem = f"leaves {budget // MIB} MiB for KV pages of {bytes_per_page} bytes"
        raise ConfigError("cpu_kv_cache_mib", cache.cpu_kv_cache_mib, problem)
    return min(fitting, most_useful_pages(cache, scheduler))


def guessed_step_bytes(scheduler: SchedulerConfig, hidden_size: int, intermediate_size: int, vocab_size: int) -> int:
    """What the largest step and the graphs may need, from shapes alone: where pages cannot wait for a measurement."""
    widest = max(intermediate_size * 3, hidden_size * 8)
    activations = scheduler.token_budget * widest * 2 * 4
    logits = scheduler.max_num_seqs * vocab_size * 4 * 4
    return activations + logits + (1 << 30)


def estimated_graph_bytes(num_graphs: int, activation_bytes: int) -> int:
    """What recordings of one pool will need: the largest step's activations once, and the driver's share for each."""
    return num_graphs * GRAPH_BYTES + activation_bytes if num_graphs else 0
