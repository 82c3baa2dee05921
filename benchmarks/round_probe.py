"""What a speculative round costs the host and the device, and whether anything in it waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

WAIT, LAUNCH, STEP = "wait", "launch", "step"


@dataclass(slots=True)
class Rounds:
    """Verify steps of one run.

    Attributes:
        spent_s: of each: seconds by part of the round, every second in the innermost part it was spent in: `WAIT` for
            the round's tokens, `LAUNCH` inside graph launches, `STEP` in no other part.
    """

    spent_s: list[dict[str, float]] = field(default_factory=list)

    def medians(self) -> dict[str, object]:
        """Microseconds a round: the host's work beside the graphs, also by part, and the launches of these."""
        if not self.spent_s:
            return {"host_us": None, "launch_us": None, "round_us": None}
        parts = {part: None for spent in self.spent_s for part in spent}
        medians = {part: 1e6 * statistics.median(spent.get(part, 0.0) for spent in self.spent_s) for part in parts}
        whole_s = [sum(spent.values()) for spent in self.spent_s]
        beside = (spent.get(WAIT, 0.0) + spent.get(LAUNCH, 0.0) for spent in self.spent_s)
        return {
            "host_us": 1e6 * statistics.median(all_s - s for all_s, s in zip(whole_s, beside, strict=True)),
            "launch_us": medians.get(LAUNCH, 0.0),
            "round_us": 1e6 * statistics.median(whole_s),
            "host_parts_us": {part: us for part, us in medians.items() if part not in (WAIT, LAUNCH)},
        }


class _Clock:
    """Times calls inside calls, each without what it calls."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self._inner_s: list[float] = []

    def timed(self, part: str, call: Callable) -> Callable:
        """`call`, its time counted as `part`'s."""

        def measured(*args: object, **named: object) -> object:
            self._inner_s.append(0.0)
            start_s = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                all_s = time.perf_counter() - start_s
                self.spent_s[part] = self.spent_s.get(part, 0.0) + all_s - self._inner_s.pop()
                if self._inner_s:
                    self._inner_s[-1] += all_s

        return measured


@contextmanager
def timed_rounds(llm) -> Iterator[Rounds]:
    """Collects every round that runs inside. A step is timed from `LLMEngine.step` to the outputs it returns."""
    from graphrunner.sampling.readback import TokenReadback
    from graphrunner.sampling.sampled_tokens import VerifiedTokens
    from graphrunner.speculative.speculation import Speculation

    rounds, clock, core = Rounds(), _Clock(), llm.engine.core
    step = clock.timed(STEP, llm.engine.step)

    def round_() -> object:
        clock.spent_s = {}
        outputs = step()
        if WAIT in clock.spent_s:
            rounds.spent_s.append(clock.spent_s)
        return outputs

    parts = [
        (core.scheduler, "schedule", "schedule"),
        (core.model_runner, "forward", "forward"),
        (core, "_take", "take"),
        (core, "_tell", "tell"),
        (Speculation, "propose", "propose"),
        (TokenReadback, "start", "readback"),
        (VerifiedTokens, "wait_blocks", WAIT),
    ]
    with ExitStack() as stack:
        for owner, name, part in parts:
            stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        stack.enter_context(mock.patch.object(llm.engine, "step", round_))
        stack.enter_context(_replays(llm, lambda replay, name: clock.timed(LAUNCH, replay)))
        yield rounds


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
