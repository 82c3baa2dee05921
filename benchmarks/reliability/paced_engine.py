"""A core process that computes nothing: one token a request a step, steps at a given pace. For what is not the model.

python benchmarks/reliability/paced_engine.py --step-ms 20      (started by a front, with its settings on stdin)
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import EngineOutput
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.core_process import core_loop
from graphrunner.entrypoints.core_process.core_main import main
from graphrunner.entrypoints.core_process.messages import News, Report

VOCAB_SIZE = 49152
MAX_MODEL_LEN = 8192
FIRST_ID, NUM_IDS = 1000, 997  # ordinary words of the embedded model's vocabulary


def token_at(place: int, seed: int) -> int:
    """The token at a place of an output; the prompt's first id is its seed, so that streams differ."""
    return FIRST_ID + (place * 31 + seed * 7) % NUM_IDS


@dataclass
class _Live:
    seed: int
    limit: int
    num_done: int = 0


class PacedEngine:
    """See `core_loop.ServedEngine`. Every request ends at its own max_tokens.

    Args:
        step_s: from one step's start to the next one's.
    """

    model_name = "paced"
    max_model_len = MAX_MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_s = 0.0
        self._live: dict[str, _Live] = {}

    def prepare(self, params: SamplingParams) -> Future[object] | None:
        return None

    def add_request(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, *, priority: int
    ) -> None:
        if params.n != 1:
            raise InvalidRequestError("n", params.n, "this engine has one output a request")
        room = MAX_MODEL_LEN - len(token_ids)
        self._live[request_id] = _Live(token_ids[0], min(params.max_tokens or room, room))

    def add_embedding_request(
        self, request_id: str, token_ids: tuple[int, ...], pooling: Pooling, *, priority: int
    ) -> None:
        raise InvalidRequestError("input", "", "this engine makes no embeddings")

    def finish(self, sequences: Sequence[str], reason: FinishReason) -> bool:
        was_live = [self._live.pop(each, None) is not None for each in sequences]
        return any(was_live)

    def step(self) -> list[EngineOutput]:
        now_s = time.perf_counter()
        if now_s < self._next_s:
            time.sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + self._step_s
        outputs = []
        for name, live in list(self._live.items()):
            token = token_at(live.num_done, live.seed)
            live.num_done += 1
            is_last = live.num_done >= live.limit
            outputs.append(EngineOutput(name, (token,), finish_reason=FinishReason.LENGTH if is_last else None))
            if is_last:
                del self._live[name]
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def stats_since(self, step_id: int) -> EngineStats:
        return EngineStats(num_running=len(self._live), num_pages=1)

    def close(self) -> None:
        """Nothing is held."""


class TimedLoop(core_loop.CoreLoop):
    """Notes when each step's message leaves."""

    sent_s: list[float] = []

    def _report(self, report: Report) -> None:
        if isinstance(report, News) and report.outputs:
            TimedLoop.sent_s.append(time.perf_counter())
        super()._report(report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--times", type=Path, help="write when each step's message left, seconds")
    arguments = parser.parse_args()
    if arguments.times is not None:
        from graphrunner.entrypoints.core_process import core_main

        core_main.CoreLoop = TimedLoop  # type: ignore[misc]
    try:
        main(lambda config: PacedEngine(arguments.step_ms / 1e3))
    finally:
        if arguments.times is not None:
            arguments.times.write_text("\n".join(map(repr, TimedLoop.sent_s)))
            sys.stdout.flush()
