"""Tiles of decode and verify steps, chosen inside the step: each is tried in all layers, kernel by kernel.

    python benchmarks/step_tuning.py [8B:1,1x5 0.6B:1,16,64 ...] [--passes 2]

Kernels chained by dependent launch share the multiprocessors with their neighbours, so the best tile of a kernel by
itself need not be the best in its place. Starts from what is in use and changes one field at a time; with more than one
row, where several kinds of kernel can be the fastest, the first pass tries instead the few that are so by themselves.
Prints rows for kernels/triton/tuned_configs.py. 8B:1,1x5 is that shape with one request, and with one that verifies
four drafts.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.attention_tuning import compile_cut
from benchmarks.kernel_steps import Model, read_bandwidth_tb_s
from benchmarks.kernel_tuning import MODELS, Shape
from benchmarks.step_candidates import Step, contenders, cuts, fastest, neighbours
from benchmarks.step_timing import heated_us, recorded, relative_time
from graphrunner.kernels.triton import linear_config
from graphrunner.kernels.triton.linear_candidates import LinearProblem
from graphrunner.kernels.triton.linear_config import LinearConfig, LinearKind, LinearShape
from graphrunner.kernels.triton.linear_tuning import compile_linear
from graphrunner.kernels.triton.tuned_configs import TUNED_ATTENTION

LEAST_GAIN = 0.002
"""Share of the step's time that a change must save."""


class StepTuner:
    """Tries configurations in one kind of step, and leaves the best in use."""

    def __init__(self, shape: Shape, step: Step, model: Model) -> None:
        self.shape, self.step, self.model = shape, step, model
        for linear in shape.linears:  # or what is tried for more rows would stand for this row, too
            linear_config.set_config(step.linear_key(linear), step.linear_config(linear))
        self._in_use = recorded(model, step)
        self.best_us = heated_us(self._in_use)
        self.rows: dict[str, tuple] = {}

    def tune_attention(self) -> None:
        """All cuts."""
        key = self.step.attention_key(self.shape)

        def put(row: tuple[int, int, int, int, int] | None) -> None:
            TUNED_ATTENTION.pop(key, None)
            if row is not None:
                TUNED_ATTENTION[key] = row

        self._tune(f"attention {TUNED_ATTENTION.get(key)}", key, TUNED_ATTENTION.get(key),
                   cuts(self.shape, self.step).values(), put, str, tuple)  # fmt: skip

    def tune_linear(self, linear: LinearShape, others: Iterable[LinearConfig]) -> None:
        """Those, against what is in use."""
        kept, key = self.step.linear_config(linear), self.step.linear_key(linear)
        what = f"{linear.mode.name.lower()} {linear.num_outputs}x{linear.num_inputs} {short(kept)}"
        self._tune(what, key, kept, others, partial(linear_config.set_config, key), short, linear_config.config_to_row)

    def _tune(
        self, what: str, key: str, kept: object, others: Iterable, put: Callable, name: Callable, row_of: Callable
    ) -> None:  # fmt: skip
        """Try each of the others; the best stays if it is better a second time: the least of many is partly luck."""
        trials = {}
        for other in others:
            put(other)
            trials[other] = self._try()
        put(kept)
        ranked = sorted(trials, key=lambda other: trials[other])[:3]
        print(f"   {what}: " + ", ".join(f"{name(other)} {trials[other]:.1f}" for other in ranked), flush=True)
        if not ranked or trials[ranked[0]] > self.best_us * (1 - LEAST_GAIN):
            return
        put(ranked[0])
        us = self._try()
        if us > self.best_us * (1 - LEAST_GAIN):
            put(kept)
            return
        self._in_use, self.best_us = recorded(self.model, self.step), us
        self.rows[key] = row_of(ranked[0])

    def _try(self) -> float:
        try:
            return self.best_us * relative_time(recorded(self.model, self.step), self._in_use)
        except Exception:  # more shared memory than there is
            torch.cuda.synchronize()
            return float("inf")


def short(config: LinearConfig) -> str:
    """What differs between neighbours."""
    fields = (
        config.block_n, config.block_k, config.slices, config.num_warps, config.num_stages,
        config.programs_per_multiprocessor, config.trigger, config.block_b, config.ahead_bytes,
    )  # fmt: skip
    flags = [name for name in ("is_described", "has_tail", "fuses_norm") if getattr(config, name)]
    return " ".join([config.kind.value, "/".join(map(str, fields)), *flags])


def jobs(shape: Shape, steps: list[Step], is_first: bool) -> Iterator[tuple[Callable, tuple]]:
    """Everything that one pass tries, to be compiled at once."""
    for step in steps:
        for linear in shape.linears:
            for other in contenders(linear, step) if is_first and step.has_kinds else neighbours(linear, step):
                if other.kind is not LinearKind.LIBRARY:
                    problem = LinearProblem(linear, step.num_rows)
                    yield compile_linear, (problem, replace(other, programs_per_multiprocessor=1))
        tiles = {(cut.block_n, cut.num_warps, cut.num_stages): cut for cut in cuts(shape, step)}
        for cut in tiles.values() if is_first and not step.is_large else ():
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
            if number == 0 and not step.is_large:  # else attention_tuning.py, with lengths of several kinds
                tuner.tune_attention()
            for linear in shape.linears:
                is_wide = number == 0 and step.has_kinds
                tuner.tune_linear(linear, fastest(linear, step) if is_wide else list(neighbours(linear, step)))
            print(f"   then {tuner.best_us:.1f} us", flush=True)
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
    start_s = time.time()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        first = [job for name, steps in plan for job in jobs(Shape.of(MODELS[name]), steps, True)]
        list(pool.map(call, dict.fromkeys(first)))
        print(f"{torch.cuda.get_device_name()}, read bandwidth {read_bandwidth_tb_s():.2f} TB/s; "
              f"{len(first)} kernels compiled at {time.time() - start_s:.0f} s", flush=True)  # fmt: skip
        for name, steps in plan:
            for key, row in tune_shape(name, Shape.of(MODELS[name]), steps, arguments.passes, pool).items():
                print(f'    "{key}": {row},')
            torch.cuda.empty_cache()  # of the shape's weights and recordings, which are gone
            print(f"   at {time.time() - start_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
