"""Tiles of small decode and verify steps, chosen inside the step: each is tried in all layers, kernel by kernel.

    python benchmarks/step_tuning.py [8B:1,1x5 0.6B:1,16 ...] [--passes 2]

Kernels chained by dependent launch share the multiprocessors with their neighbours, so the best tile of a kernel by
itself need not be the best in its place. Starts from what is in use and changes one field at a time; prints rows for
kernels/triton/tuned_configs.py. 8B:1,1x5 is that shape with one request, and with one that verifies four drafts.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.attention_tuning import compile_cut
from benchmarks.kernel_steps import Model, read_bandwidth_tb_s
from benchmarks.kernel_tuning import CONTEXT, DEVICE, DTYPE, MODELS, PAGE_SIZE, Shape
from graphrunner.kernels.triton import linear_config, runtime
from graphrunner.kernels.triton.attention_common import DecodeMetadata
from graphrunner.kernels.triton.decode_attention_config import (
    DecodeAttentionConfig,
    attention_key,
    num_splits_for,
)
from graphrunner.kernels.triton.linear_config import LinearConfig, LinearKind, LinearShape, is_valid
from graphrunner.kernels.triton.linear_tuning import LinearProblem, compile_linear
from graphrunner.kernels.triton.tuned_configs import TUNED_ATTENTION

NUM_REPLAYS, NUM_ROUNDS = 8, 3
LEAST_GAIN = 0.001
"""Share of the step's time that a change must save."""
FIELDS: dict[LinearKind, dict[str, tuple[int, ...]]] = {
    LinearKind.VECTOR: {
        "programs_per_multiprocessor": (1, 2, 3, 4), "num_stages": (2, 3, 4, 5), "block_n": (1, 2, 4, 8),
        "block_k": (512, 1024, 2048), "num_warps": (4, 8), "trigger": (0, 1),
    },
    LinearKind.MMA: {
        "block_n": (16, 32), "block_k": (64, 128, 256), "slices": (4, 8), "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4), "trigger": (0, 1),
    },
    LinearKind.SKINNY: {
        "block_n": (64, 128), "block_k": (64, 128), "slices": (1, 2, 4), "num_warps": (4, 8),
        "num_stages": (3, 4, 5, 6, 8), "ahead_bytes": (0, 1024),
    },
}  # fmt: skip
ATTENTION_TILES = ((32, 2, 2), (32, 4, 2), (64, 2, 2), (64, 4, 2), (128, 4, 2))
"""Tokens, warps, stages."""
ATTENTION_PROGRAMS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Step:
    """So many requests, each with `width` tokens."""

    num_requests: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Step":
        """From "16" or "1x5"."""
        num_requests, _, width = text.partition("x")
        return cls(int(num_requests), int(width or 1))

    @property
    def num_rows(self) -> int:
        """Rows of its projections."""
        return self.num_requests * self.width

    def metadata(self, model: Model) -> DecodeMetadata:
        """Its last tokens stand at the end of CONTEXT."""
        rows = torch.arange(1, self.num_requests + 1, dtype=torch.int32, device=DEVICE)
        position = torch.arange(CONTEXT - self.width, CONTEXT, device=DEVICE)
        pages = model.page_table[rows.long()][:, position // PAGE_SIZE].long()
        slots = pages * PAGE_SIZE + position % PAGE_SIZE
        seq_lens = torch.full((self.num_requests,), CONTEXT, dtype=torch.int32, device=DEVICE)
        return DecodeMetadata(position.repeat(self.num_requests), slots.flatten(), seq_lens, rows, model.page_table)

    def linear_key(self, linear: LinearShape) -> str:
        """A projection's entry in the table."""
        return linear_config.config_key(DEVICE, DTYPE, linear, self.num_rows)

    def linear_config(self, linear: LinearShape) -> LinearConfig:
        """What a projection runs now."""
        return linear_config.select_config(linear, self.num_rows, DTYPE, DEVICE)

    def attention_key(self, shape: Shape) -> str:
        """Attention's entry in the table."""
        return attention_key(self.num_requests, shape.kv_heads, shape.head_dim, DEVICE, DTYPE, self.width)


def step_us(model: Model, step: Step) -> float:
    """Microseconds of one replay among others, back to back as in decoding; the best of some rounds."""
    metadata = step.metadata(model)
    ids = torch.ones(step.num_rows, dtype=torch.int32, device=DEVICE)
    model.forward(ids, metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward(ids, metadata)
    graph.replay()
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, 1e3 * start.elapsed_time(stop) / NUM_REPLAYS)
    return best


def neighbours(linear: LinearShape, step: Step) -> Iterator[LinearConfig]:
    """Configurations that differ in one field from what is in use."""
    config = step.linear_config(linear)
    for name, values in FIELDS.get(config.kind, {}).items():
        for value in values:
            other = replace(config, **{name: value})
            if other != config and is_valid(other, linear, step.num_rows, DTYPE):
                yield other


def cuts(shape: Shape, step: Step) -> dict[DecodeAttentionConfig, tuple[int, int, int, int, int]]:
    """Ways to cut attention, each with the row of the table that yields it."""
    found = {}
    for programs in ATTENTION_PROGRAMS:
        num_programs = programs * runtime.num_multiprocessors(DEVICE)
        splits = num_splits_for(num_programs, step.num_requests * shape.kv_heads)
        for block_n, warps, stages in ATTENTION_TILES:
            config = DecodeAttentionConfig(splits, block_n, warps, stages)
            found.setdefault(config, (programs, block_n, warps, stages, 0))
    return found


class StepTuner:
    """Tries configurations in one kind of step, and leaves the best in use."""

    def __init__(self, shape: Shape, step: Step, model: Model) -> None:
        self.shape, self.step, self.model = shape, step, model
        for linear in shape.linears:  # or what is tried for more rows would stand for this row, too
            linear_config.set_config(step.linear_key(linear), step.linear_config(linear))
        self.best_us = step_us(model, step)
        self.rows: dict[str, tuple] = {}

    def tune_attention(self) -> None:
        """All cuts."""
        key = self.step.attention_key(self.shape)
        kept = TUNED_ATTENTION.get(key)
        trials = {}
        for row in cuts(self.shape, self.step).values():
            TUNED_ATTENTION[key] = row
            trials[row] = self._try()
        best = min(trials, key=lambda row: trials[row])
        if self._is_better(trials[best]):
            TUNED_ATTENTION[key] = self.rows[key] = best
        elif kept is None:
            del TUNED_ATTENTION[key]
        else:
            TUNED_ATTENTION[key] = kept
        self._report(f"attention {kept}", trials, str)

    def tune_linear(self, linear: LinearShape) -> None:
        """Neighbours of what is in use."""
        kept, key, trials = self.step.linear_config(linear), self.step.linear_key(linear), {}
        for other in list(neighbours(linear, self.step)):
            linear_config.set_config(key, other)
            trials[other] = self._try()
        best = min(trials, key=lambda config: trials[config])
        is_better = self._is_better(trials[best])
        linear_config.set_config(key, best if is_better else kept)
        if is_better:
            self.rows[key] = linear_config.config_to_row(best)
        self._report(
            f"{linear.mode.name.lower()} {linear.num_outputs}x{linear.num_inputs} {short(kept)}", trials, short
        )

    def _is_better(self, us: float) -> bool:
        if us > self.best_us * (1 - LEAST_GAIN):
            return False
        self.best_us = us
        return True

    def _try(self) -> float:
        try:
            return step_us(self.model, self.step)
        except Exception:  # more shared memory than there is
            torch.cuda.synchronize()
            return float("inf")

    @staticmethod
    def _report(what: str, trials: dict, name: Callable[[object], str]) -> None:
        ranked = sorted(trials, key=lambda config: trials[config])[:3]
        print(f"   {what}: " + ", ".join(f"{name(config)} {trials[config]:.1f}" for config in ranked), flush=True)


def short(config: LinearConfig) -> str:
    """What differs between neighbours."""
    fields = ("block_n", "block_k", "slices", "num_warps", "num_stages", "programs_per_multiprocessor", "trigger")
    return f"{config.kind.value} {'/'.join(str(getattr(config, name)) for name in fields)}/{config.ahead_bytes}"


def jobs(shape: Shape, steps: list[Step], has_attention: bool) -> Iterator[tuple[Callable, tuple]]:
    """Everything that one pass tries, to be compiled at once."""
    for step in steps:
        for linear in shape.linears:
            for other in neighbours(linear, step):
                yield (
                    compile_linear,
                    (LinearProblem(linear, step.num_rows), replace(other, programs_per_multiprocessor=1)),
                )
        tiles = {(cut.block_n, cut.num_warps, cut.num_stages): cut for cut in cuts(shape, step)}
        for cut in tiles.values() if has_attention else ():
            yield compile_cut, (shape, step.num_requests, cut, step.width)


def call(job: tuple[Callable, tuple]) -> str:
    """Run in a process of the pool."""
    function, argument = job
    return function(argument)


def tune_shape(name: str, shape: Shape, steps: list[Step], num_passes: int, pool: ProcessPoolExecutor) -> dict:
    """Tune some steps of one shape; returns rows of both tables."""
    model = Model(shape, max(step.num_requests for step in steps))
    tuners = [StepTuner(shape, step, model) for step in steps]
    for number in range(num_passes):
        if number:
            list(pool.map(call, dict.fromkeys(jobs(shape, steps, False))))
        for tuner in tuners:
            step = tuner.step
            print(f"{name} {step.num_requests}x{step.width}, pass {number + 1}: {tuner.best_us:.1f} us", flush=True)
            if number == 0:
                tuner.tune_attention()
            for linear in shape.linears:
                if step.linear_config(linear).kind in FIELDS:
                    tuner.tune_linear(linear)
            print(f"   then {tuner.best_us:.1f} us", flush=True)
    del model
    torch.cuda.empty_cache()
    return {key: row for tuner in tuners for key, row in tuner.rows.items()}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "plan", nargs="*", default=["0.6B:1", "1B:1", "8B:1"], help="SHAPE:STEP,STEP; 135M, 0.6B, 1B, 8B"
    )
    parser.add_argument("--passes", type=int, default=2)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures a CUDA device, and there is none")
    plan = [(name, [Step.parse(text) for text in steps.split(",")])
            for name, _, steps in (part.partition(":") for part in arguments.plan)]  # fmt: skip
    start_s, rows = time.time(), {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        first = [job for name, steps in plan for job in jobs(Shape.of(MODELS[name]), steps, True)]
        list(pool.map(call, dict.fromkeys(first)))
        print(f"{torch.cuda.get_device_name()}, read bandwidth {read_bandwidth_tb_s():.2f} TB/s; "
              f"{len(first)} kernels compiled at {time.time() - start_s:.0f} s", flush=True)  # fmt: skip
        for name, steps in plan:
            rows |= tune_shape(name, Shape.of(MODELS[name]), steps, arguments.passes, pool)
            print(f"   at {time.time() - start_s:.0f} s", flush=True)
    for key, row in rows.items():
        print(f'    "{key}": {row},')


if __name__ == "__main__":
    main()
