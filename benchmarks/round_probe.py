"""What a speculative round costs the host and the device, and whether anything in it waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Rounds:
    """Verify steps of one run.

    Attributes:
        wall_s, wait_s, launch_s: of each: in all, waiting for its tokens, inside graph launches.
    """

    wall_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    launch_s: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float | None]:
        """Microseconds a round: the host's work beside the graphs, and the launches of these."""
        if not self.wall_s:
            return {"host_us": None, "launch_us": None, "round_us": None}
        parts = zip(self.wall_s, self.wait_s, self.launch_s, strict=True)
        host_s = statistics.median(wall - wait - launch for wall, wait, launch in parts)
        return {
            "host_us": 1e6 * host_s,
            "launch_us": 1e6 * statistics.median(self.launch_s),
            "round_us": 1e6 * statistics.median(self.wall_s),
        }


@contextmanager
def timed_rounds(llm) -> Iterator[Rounds]:
    """Collects every round that runs inside. A step is timed from `LLMEngine.step` to the outputs it returns."""
    from graphrunner.sampling.sampled_tokens import VerifiedTokens

    rounds, engine, plain_wait = Rounds(), llm.engine, VerifiedTokens.wait_blocks
    plain_step = engine.step
    spent = [0.0, 0.0, 0]

    def wait(self: VerifiedTokens) -> list[list[int]]:
        start_s = time.perf_counter()
        blocks = plain_wait(self)
        spent[0] += time.perf_counter() - start_s
        spent[2] += 1
        return blocks

    def step() -> object:
        spent[:] = [0.0, 0.0, 0]
        start_s = time.perf_counter()
        outputs = plain_step()
        if spent[2]:
            rounds.wall_s.append(time.perf_counter() - start_s)
            rounds.wait_s.append(spent[0])
            rounds.launch_s.append(spent[1])
        return outputs

    def launch(replay: Callable, name: str) -> Callable:
        def timed(key) -> object:
            start_s = time.perf_counter()
            output = replay(key)
            spent[1] += time.perf_counter() - start_s
            return output

        return timed

    engine.step, VerifiedTokens.wait_blocks = step, wait  # type: ignore[method-assign]
    try:
        with _replays(llm, launch):
            yield rounds
    finally:
        del engine.step
        VerifiedTokens.wait_blocks = plain_wait  # type: ignore[method-assign]


def device_ms(llm, run: Callable[[], object]) -> dict[str, float]:
    """Mean milliseconds of each runner's graphs during `run`, by the device's own clock."""
    import torch

    marks: dict[str, list[tuple]] = {}

    def marked(replay: Callable, name: str) -> Callable:
        def timed(key) -> object:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            output = replay(key)
            end.record()
            marks.setdefault(f"{name} {key}", []).append((start, end))
            return output

        return timed

    with _replays(llm, marked):
        run()
    torch.cuda.synchronize()
    return {name: statistics.mean(a.elapsed_time(b) for a, b in pairs) for name, pairs in marks.items()}


def waits_in_rounds(llm, prompt: Sequence[int], num_rounds: int) -> str:
    """'none in N rounds', or what waited. Torch itself raises on every call that waits for the whole device."""
    import torch

    from graphrunner import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=12 * num_rounds, ignore_eos=True, detokenize=False)
    llm.engine.add_request("waits", {"prompt_token_ids": list(prompt)}, params)
    core = llm.engine.core  # whose steps raise; the engine's would end the request and go on
    for _ in range(3):
        core.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(num_rounds):
            core.step()
        found = f"none in {num_rounds} rounds"
    except RuntimeError as error:
        core.fail_running(error)
        found = f"{type(error).__name__}: {error}"
    torch.cuda.set_sync_debug_mode("default")
    llm.abort("waits")
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    return found


@contextmanager
def _replays(llm, wrapped: Callable[[Callable, str], Callable]) -> Iterator[None]:
    """Every graph runner's `backend.replay` as `wrapped(replay, runner's name)` makes it."""
    backends = {
        id(runner.backend): (runner.backend, runner.name) for runner in llm.engine.core.model_runner.graph_runners
    }
    for backend, name in backends.values():
        backend.replay = wrapped(backend.replay, name)
    try:
        yield
    finally:
        for backend, _ in backends.values():
            del backend.replay
