"""How many pages fit: numbers alone."""

import pytest

from graphrunner.config.engine_config import CacheConfig, SchedulerConfig
from graphrunner.core.errors import ConfigError
from graphrunner.engine.memory_plan import (
    GRAPH_BYTES,
    DeviceMemory,
    estimated_graph_bytes,
    guessed_step_bytes,
    most_useful_pages,
    page_capacity,
    plan_device_pages,
    plan_host_pages,
)

MIB = 1 << 20
PAGE = 2 * MIB
LATE = 256  # MiB kept for what is loaded late


def memory(used_mib: int, step_mib: int = 0, total_mib: int = 8192, committed_mib: int = 0) -> DeviceMemory:
    return DeviceMemory(total_mib * MIB, used_mib * MIB, committed_mib * MIB, step_mib * MIB)


def fit(budget: int) -> int:
    return budget // PAGE


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("used", [0, 500, 1400])
@pytest.mark.parametrize("step", [0, 100, 333])
def test_the_share_is_used_up_and_never_exceeded(share: float, used: int, step: int) -> None:
    limit = int(8192 * share)
    num_pages = plan_device_pages(CacheConfig(gpu_memory_utilization=share), memory(used, step), fit)
    in_use = used + step + LATE + num_pages * 2
    assert limit - 2 < in_use <= limit


def test_pages_that_have_memory_are_paid_once() -> None:
    config = CacheConfig(gpu_memory_utilization=0.5)
    assert plan_device_pages(config, memory(1000, committed_mib=200), fit) == plan_device_pages(
        config, memory(800), fit
    )


@pytest.mark.parametrize("used", [4096 - LATE - 2, 4096, 8000])
def test_no_room_names_the_setting_and_every_number(used: int) -> None:
    with pytest.raises(ConfigError, match=rf"gpu_memory_utilization=0.5: 4096 of .*8192 MiB.*have {used}, a step"):
        plan_device_pages(CacheConfig(gpu_memory_utilization=0.5), memory(used), fit)


def test_a_number_that_the_user_gives_is_taken_or_refused() -> None:
    config = CacheConfig(gpu_memory_utilization=0.5, num_pages=100)
    assert plan_device_pages(config, memory(0), fit) == 100
    with pytest.raises(ConfigError, match=r"num_pages=100: .* 100$"):
        plan_device_pages(config, memory(4096 - LATE - 198), fit)
    assert page_capacity(config, SchedulerConfig(), PAGE, 10 * MIB) == 100


def test_addresses_reach_as_far_as_pages_are_of_use() -> None:
    limits = SchedulerConfig(max_num_seqs=4, max_model_len=100)
    with_prefixes, without = CacheConfig(), CacheConfig(enable_prefix_caching=False)
    assert most_useful_pages(without, limits) == 4 * 7 + 1
    assert most_useful_pages(with_prefixes, limits) == 8 * 4 * 7 + 1
    assert page_capacity(without, limits, PAGE, 1 << 40) == 29
    assert page_capacity(without, limits, PAGE, 20 * PAGE) == 20
    assert page_capacity(without, limits, PAGE, 0) == 2  # whether they fit is told later, with the reason


def test_pages_on_a_host() -> None:
    limits = SchedulerConfig(max_num_seqs=4, max_model_len=100)
    config = CacheConfig(enable_prefix_caching=False, cpu_kv_cache_mib=20)
    assert plan_host_pages(config, limits, PAGE) == 10
    assert plan_host_pages(config, limits, 16) == 29
    assert plan_host_pages(CacheConfig(num_pages=3), limits, PAGE) == 3
    with pytest.raises(ConfigError, match=r"cpu_kv_cache_mib=1: leaves 1 MiB for KV pages of 2097152 bytes"):
        plan_host_pages(CacheConfig(cpu_kv_cache_mib=1), limits, PAGE)


def test_estimates_grow_with_what_they_are_of() -> None:
    small = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    assert guessed_step_bytes(small, 64, 128, 100) < guessed_step_bytes(SchedulerConfig(), 64, 128, 100)
    assert estimated_graph_bytes(0, 7) == 0
    assert estimated_graph_bytes(10, 7) == 10 * GRAPH_BYTES + 7
