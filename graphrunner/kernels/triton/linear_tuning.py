"""Measure which kernel a small-batch projection should run, on the card at hand.

All variants are compiled first, in parallel processes that fill Triton's on-disk cache; then each is timed inside a
CUDA graph, chained over enough copies of the weight that no cache can hold them.
"""

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrunner.kernels.triton import linear_config
from graphrunner.kernels.triton.activation import gate_mul
from graphrunner.kernels.triton.decode_linear import launch_linear, num_programs, prepare_linear
from graphrunner.kernels.triton.linear_call import LinearCall
from graphrunner.kernels.triton.linear_candidates import LinearProblem, candidate_configs
from graphrunner.kernels.triton.linear_config import (
    LinearConfig,
    LinearKind,
    LinearMode,
    LinearShape,
)
from graphrunner.kernels.triton.norms import rms_norm
from graphrunner.kernels.triton.sample import ArgmaxPartials, argmax_partials

_BYTES_PER_CHAIN = 192 << 20  # several times any L2
_MAX_CHAIN = 192
_TIMED_REPLAYS = 3
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LinearTiming:
    """What one configuration took, microseconds a launch within a chain."""

    problem: LinearProblem
    config: LinearConfig
    time_us: float

    @property
    def bandwidth_tb_s(self) -> float:
        """Weight bytes over time."""
        shape = self.problem.shape
        num_rows = shape.num_outputs * (2 if shape.mode is LinearMode.GATED else 1)
        return num_rows * shape.num_inputs * self.problem.dtype.itemsize / self.time_us / 1e6


def make_call(problem: LinearProblem, weight: Tensor) -> LinearCall:
    """Random operands around a weight (of any device, meta included)."""
    shape, rows = problem.shape, problem.num_rows
    device = weight.device
    x = torch.randn(rows, shape.num_inputs, dtype=problem.dtype, device=device)
    residual = torch.zeros(rows, shape.num_outputs, dtype=problem.dtype, device=device)
    has_norm = shape.mode is not LinearMode.RESIDUAL
    norm_weight = torch.ones(shape.num_inputs, device=device) if has_norm else None
    out = residual if shape.mode is LinearMode.RESIDUAL else torch.empty_like(residual)
    return LinearCall(shape.mode, x, norm_weight, _EPS, weight, None, residual, out)


def _weight_size(shape: LinearShape) -> tuple[int, int]:
    return shape.num_outputs * (2 if shape.mode is LinearMode.GATED else 1), shape.num_inputs


def _partials(problem: LinearProblem, config: LinearConfig, device: torch.device, place: torch.device):
    if problem.shape.mode is not LinearMode.ARGMAX or config.kind is LinearKind.LIBRARY:
        return None
    size = (problem.num_rows, num_programs(config, problem.shape, device))
    return ArgmaxPartials(torch.empty(size, device=place), torch.empty(size, dtype=torch.int32, device=place))


def compile_linear(job: tuple[LinearProblem, LinearConfig]) -> str:
    """Compile one variant in this process; returns the error's text, empty when there is none."""
    problem, config = job
    device, meta = torch.device("cuda", 0), torch.device("meta")
    try:
        call = make_call(problem, torch.empty(_weight_size(problem.shape), dtype=problem.dtype, device=meta))
        prepare_linear(call, config, device, _partials(problem, config, device, meta)).compile()
    except Exception as error:  # a variant the compiler refuses is simply not a candidate
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(compile_one: Callable[[object], str], jobs: Iterable[object], num_processes: int) -> dict[object, str]:
    """Run compile_one over all jobs in fresh processes; returns each job's error text."""
    jobs = list(jobs)
    if not jobs:
        return {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=context) as pool:
        return dict(zip(jobs, pool.map(compile_one, jobs, chunksize=4), strict=True))


def time_in_graph(run_chain: Callable[[], None], length: int) -> float:
    """Microseconds an element of a chain takes inside a CUDA graph, the best of a few replays."""
    run_chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_chain()
    graph.replay()
    best = float("inf")
    for _ in range(_TIMED_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best * 1e3 / length


def _run_library(call: LinearCall) -> None:
    if call.mode is LinearMode.RESIDUAL:
        call.out.addmm_(call.x, call.weight.t())
        return
    hidden = call.x if call.norm_weight is None else rms_norm(call.x, call.norm_weight, call.eps)
    projected = F.linear(hidden, call.weight)
    if call.mode is LinearMode.GATED:
        gate_mul(projected, call.is_gelu)
    if call.mode is LinearMode.ARGMAX:
        argmax_partials(projected)


def time_config(problem: LinearProblem, config: LinearConfig, weights: list[Tensor]) -> LinearTiming:
    """Time one configuration over copies of the weight.

    Errors: whatever Triton raises for a variant that does not fit the card.
    """
    calls = [make_call(problem, weight) for weight in weights[:1]]
    first = calls[0]
    calls += [
        LinearCall(first.mode, first.x, first.norm_weight, first.eps, weight, None, first.residual, first.out)
        for weight in weights[1:]
    ]
    device = first.x.device
    if config.kind is LinearKind.LIBRARY:
        return LinearTiming(problem, config, time_in_graph(lambda: [_run_library(call) for call in calls], len(calls)))
    partials = _partials(problem, config, device, device)
    chain = partial(_run_all, calls, config, partials)
    return LinearTiming(problem, config, time_in_graph(chain, len(calls)))


def _run_all(calls: list[LinearCall], config: LinearConfig, partials: ArgmaxPartials | None) -> None:
    for call in calls:
        launch_linear(call, config, partials)


def weight_copies(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Random weights of one shape, together larger than the caches."""
    rows, width = _weight_size(shape)
    count = max(2, min(_MAX_CHAIN, -(-_BYTES_PER_CHAIN // (rows * width * dtype.itemsize))))
    return [torch.empty(rows, width, dtype=dtype, device=device).normal_(0, 0.02) for _ in range(count)]


def tune_decode_linear(
    problems: list[LinearProblem],
    device: torch.device,
    num_processes: int = 8,
    report: Callable[[LinearProblem, list[LinearTiming]], None] | None = None,
    is_exhaustive: bool = False,
) -> dict[LinearProblem, list[LinearTiming]]:
    """Time every candidate of every problem and prefer the best from now on in this process.

    Args:
        problems: what to measure.
        device: a CUDA device.
        num_processes: compilers to run at once.
        report: called with each problem's timings as they come.
        is_exhaustive: see candidate_configs.

    Returns:
        All timings, best first. linear_config.save_overrides keeps the winners.
    """
    jobs = [(problem, config) for problem in problems for config in candidate_configs(problem, is_exhaustive)]
    fused = dict.fromkeys(_compiled_form(*job) for job in jobs if job[1].kind is not LinearKind.LIBRARY)
    errors = compile_all(compile_linear, fused, num_processes)
    results: dict[LinearProblem, list[LinearTiming]] = {}
    for shape in dict.fromkeys(problem.shape for problem in problems):
        mine = [problem for problem in problems if problem.shape == shape]
        weights = weight_copies(shape, mine[0].dtype, device)
        for problem in mine:
            configs = [c for p, c in jobs if p == problem and not errors.get(_compiled_form(p, c))]
            timings = _time_all(problem, configs, weights)
            results[problem] = timings
            if report is not None:
                report(problem, timings)
            key = linear_config.config_key(device, problem.dtype, shape, problem.num_rows)
            linear_config.set_config(key, timings[0].config)
        del weights
    return results


def _compiled_form(problem: LinearProblem, config: LinearConfig) -> tuple[LinearProblem, LinearConfig]:
    """What is compiled: the size of the grid is not."""
    return problem, replace(config, programs_per_multiprocessor=1)


def _time_all(problem: LinearProblem, configs: list[LinearConfig], weights: list[Tensor]) -> list[LinearTiming]:
    """Timings, best first; the best few once more with the other trigger, or asking for nothing ahead."""
    timings: list[LinearTiming] = []

    def attempt(config: LinearConfig) -> None:
        try:
            timings.append(time_config(problem, config, weights))
        except Exception as error:
            # Out of shared memory or registers: not a candidate on this card. Anything sticky fails the next one too.
            torch.cuda.synchronize()
            del error

    for config in configs:
        attempt(config)
    timings.sort(key=lambda timing: timing.time_us)
    for timing in timings[:2]:
        if timing.config.kind is LinearKind.SKINNY:
            attempt(replace(timing.config, ahead_bytes=0))
        elif timing.config.kind is not LinearKind.LIBRARY:
            attempt(replace(timing.config, trigger=1 - timing.config.trigger))
    return sorted(timings, key=lambda timing: timing.time_us)
