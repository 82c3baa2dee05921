"""The parts below the runners: tapes, breaks, and which reason is reported."""

import threading

import pytest
import torch

from graphrunner.device.graph import eager_break, listening
from graphrunner.device.registry import device_of
from graphrunner.device.tape_graph import TapeGraph


def test_a_tape_plays_on_the_same_addresses() -> None:
    source, counter = torch.zeros(3), torch.zeros(1)
    tape = TapeGraph()
    tape.begin()
    view = (source + 1).view(3, 1)
    out = view * 2
    counter.add_(1)
    tape.end()
    address = out.data_ptr()
    source.copy_(torch.tensor([1.0, 2.0, 3.0]))
    tape.replay()
    assert out.flatten().tolist() == [4, 6, 8] and out.data_ptr() == address
    assert counter.item() == 2 and tape.num_nodes() == 3


def test_a_broken_tape_stops_listening() -> None:
    tape = TapeGraph()
    tape.begin()
    with pytest.raises(RuntimeError, match="reads a value back"):
        torch.ones(1).item()
    tape.release()
    assert torch.ones(1).item() == 1 and tape.num_nodes() == 0


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def on_break(self, call, batch, tensor):
        self.count += 1
        with listening(None):
            return call(batch, tensor)


def test_breaks_are_plain_calls_unless_somebody_listens() -> None:
    counter = _Counter()
    nested = lambda batch, x: eager_break(lambda inner, y: inner + y, batch, x)  # noqa: E731
    assert eager_break(nested, 1, 1) == 2
    with listening(counter):
        assert eager_break(nested, 1, 1) == 2
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(eager_break(nested, 5, 1)))
        thread.start()
        thread.join()
    assert counter.count == 1 and seen == [6]


def test_the_cpu_as_a_device() -> None:
    device = device_of(torch.device("cpu"))
    assert device is device_of(torch.device("cpu")) and not device.has_own_memory
    assert 0 < device.free_bytes() <= device.total_bytes()
    device.synchronize()
    fence = device.fence()
    fence.record()
    fence.wait()
