"""KV pages at addresses that stay while their number is still unknown."""

import pytest
import torch
from fakes.fake_accelerator import GRANULE_BYTES, FakeAccelerator, install

from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.pool import KVLayerSpec, KVPool, KVSpec

SPEC = KVSpec((KVLayerSpec(2, 16), KVLayerSpec(1, 64)))  # 1 KiB and 2 KiB a page of 8 tokens in bf16, twice each
CAPACITY = 500


def open_pool(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeAccelerator, KVPool]:
    accelerator = install(monkeypatch, FakeAccelerator(1 << 30))
    return accelerator, KVPool(SPEC, CAPACITY, 8, torch.bfloat16, "cpu", committed_pages=1)


def test_a_pool_grows_under_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, pool = open_pool(monkeypatch)
    assert accelerator.page_bytes() == 4 * GRANULE_BYTES == pool.committed_bytes(1)
    layers = pool.layers
    addresses = [layer.k.data_ptr() for layer in layers]
    assert [tuple(layer.v.shape) for layer in layers] == [(CAPACITY, 8, 2, 16), (CAPACITY, 8, 1, 64)]
    layers[1].k[0] = 5.0
    pool.commit(100)
    assert [tuple(layer.k.shape) for layer in layers] == [(100, 8, 2, 16), (100, 8, 1, 64)]
    assert (layers[1].k[0] == 5).all() and not layers[1].k[1:].any() and not layers[0].v.any()
    assert pool.num_pages == 100 and pool.num_bytes == sum(c.nbytes for la in layers for c in (la.k, la.v))
    pool.poison(float("nan"))
    pool.release()
    assert accelerator.page_bytes() == 0
    pool.reopen()
    assert accelerator.page_bytes() == 4 * GRANULE_BYTES
    pool.commit(pool.num_pages)
    assert pool.layers is layers and addresses == [layer.k.data_ptr() for layer in layers]
    assert not any(cache.any() for layer in layers for cache in (layer.k, layer.v))


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("num_pages", [1, 32, 33, 64, 65, 128, CAPACITY])
def test_the_budget_is_kept_to_the_byte(monkeypatch: pytest.MonkeyPatch, num_pages: int, extra: int) -> None:
    accelerator, pool = open_pool(monkeypatch)
    budget = pool.committed_bytes(num_pages) + extra
    fitting = pool.fitting_pages(budget)
    assert fitting == CAPACITY or pool.committed_bytes(fitting + 1) > budget
    assert (fitting >= num_pages) == (extra >= 0)
    if fitting:
        pool.commit(fitting)
        assert accelerator.page_bytes() == pool.committed_bytes(fitting) <= budget


def test_a_pool_that_does_not_fit_can_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, pool = open_pool(monkeypatch)
    accelerator.set_limit(20 * GRANULE_BYTES)
    with pytest.raises(MemoryError):
        pool.commit(CAPACITY)
    pool.release()
    assert accelerator.page_bytes() == 0
    pool.reopen()
    pool.commit(100)


def test_a_cut_allocator_hands_out_what_is_left() -> None:
    allocator = PageAllocator(50)
    allocator.cut(8)
    allocator.check_invariants()
    assert allocator.capacity == 7 == allocator.num_free
    assert sorted(allocator.allocate(7)) == list(range(1, 8))
    with pytest.raises(AssertionError, match="in use"):
        allocator.cut(4)
