"""Memory of recordings: given back on close, and after a failed capture."""

import pytest
import torch

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.errors import CaptureError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.device.registry import device_of
from graphrunner.execution.registry import create_execution_backend

KEYS = [ShapeKey(size, size, ForwardVariant.LOGITS) for size in (4, 2, 1)]
MIB = 1 << 20
pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("kind", [GraphBackend.FULL, GraphBackend.BREAKABLE], ids=lambda b: b.value)
def test_smaller_keys_reuse_the_pool_and_close_gives_it_back(kind: GraphBackend) -> None:
    cuda = torch.device("cuda")
    backend, device = create_execution_backend(kind, cuda), device_of(cuda)
    state = torch.zeros(64 * MIB // 4, device=cuda)
    torch.cuda.empty_cache()
    before = device.reserved_bytes()
    with backend.capture_session():
        stats = [backend.capture_one(key, lambda: ModelOutput(logits=(state + 1)[:1] * 2)) for key in KEYS]
    assert stats[0].num_nodes == 2
    assert 64 * MIB <= device.reserved_bytes() - before < 100 * MIB
    state.fill_(3)
    assert [backend.replay(key).logits.item() for key in KEYS] == [8, 8, 8]

    def breaks() -> ModelOutput:
        raise_from = torch.cuda.is_current_stream_capturing()
        out = (state + 2) * 3
        if raise_from:
            raise ValueError("no")
        return ModelOutput(logits=out)

    with backend.capture_session(), pytest.raises(CaptureError, match="ValueError: no"):
        backend.capture_one(KEYS[0], breaks)
    assert backend.replay(KEYS[1]).logits.item() == 8
    backend.close()
    assert device.reserved_bytes() - before <= 2 * MIB
    with backend.capture_session():
        backend.capture_one(KEYS[0], lambda: ModelOutput(logits=state[:1] * 2))
    assert backend.replay(KEYS[0]).logits.item() == 6
