"""Measure which kernel a small-batch projection should run, on the card at hand.

All variants are compiled first, in parallel processes that fill Triton's on-disk cache; then each is timed inside a
CUDA graph, chained over enough copies of the weight that no cache can hold them.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrunner.kernels.triton import linear_config, runtime
from graphrunner.kernels.triton.activation import gate_mul
from graphrunner.kernels.triton.decode_linear import LinearCall, launch_linear, num_programs, prepare_linear
from graphrunner.kernels.triton.linear_config import (
    LIBRARY_CONFIG,
    MAX_FUSED_ROWS,
    LinearConfig,
    LinearKind,
    LinearMode,
    LinearShape,
    is_valid,
    padded_columns,
)
from graphrunner.kernels.triton.norms import rms_norm
from graphrunner.kernels.triton.sample import ArgmaxPartials, argmax_partials

_BYTES_PER_CHAIN = 192 << 20  # several times any L2
_MAX_CHAIN = 192
_MIN_RING_BYTES, _MAX_RING_BYTES = 16 << 10, 208 << 10
_TIMED_REPLAYS = 3
_AHEAD_BYTES = 1024
_MAX_INPUTS_OF_ONE_ROW_MMA = 2048  # one turn of the loop
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """One entry of the table to fill: a shape at a number of rows."""

    shape: LinearShape
    num_rows: int
    dtype: torch.dtype = torch.bfloat16


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


def candidate_configs(problem: LinearProblem, is_exhaustive: bool = False) -> list[LinearConfig]:
    """Configurations worth timing, the library first.

    Args:
        problem: what will run.
        is_exhaustive: every tile that fits the card (50 to 150 of them, minutes to compile) instead of the few that
            won somewhere.
    """
    shape, num_rows = problem.shape, problem.num_rows
    found = [LIBRARY_CONFIG]
    if num_rows <= 2:
        found += _vector_candidates(problem, is_exhaustive)
    if num_rows <= MAX_FUSED_ROWS and (num_rows > 1 or shape.num_inputs <= _MAX_INPUTS_OF_ONE_ROW_MMA):
        found += _tensor_core_candidates(problem, is_exhaustive)
    described = _described_candidates(problem) if num_rows > MAX_FUSED_ROWS else []
    if num_rows > 4 and (is_exhaustive or not described):
        found += _skinny_candidates(problem, is_exhaustive)
    found += described
    return [config for config in dict.fromkeys(found) if is_valid(config, shape, num_rows, problem.dtype)]


def _vector_candidates(problem: LinearProblem, is_exhaustive: bool) -> list[LinearConfig]:
    """Tiles of whole rows: measured best at 16 KiB a tile, 3 or 4 tiles in flight, 2 or 3 programs."""
    shape = problem.shape
    row_bytes = shape.num_inputs * problem.dtype.itemsize * (2 if shape.mode is LinearMode.GATED else 1)
    whole_row = runtime.next_power_of_2(shape.num_inputs)
    num_multiprocessors = runtime.num_multiprocessors(torch.device("cuda", 0))
    depths = itertools.product((2, 3, 4, 5), (1, 2, 3)) if is_exhaustive else ((4, 2), (3, 3), (3, 2))
    largest = 64 << 10 if is_exhaustive else 32 << 10
    found = []
    for (num_stages, programs), block_n, num_warps in itertools.product(depths, (1, 2, 4, 8, 16), (4, 8)):
        tile_bytes = block_n * row_bytes
        # Where all tiles run at once there is no ring to fill.
        is_at_once = shape.num_outputs // block_n <= programs * num_multiprocessors
        is_deep = is_at_once or tile_bytes * num_stages >= _MIN_RING_BYTES
        fits = is_deep and tile_bytes * num_stages * programs <= _MAX_RING_BYTES
        is_good = tile_bytes <= largest and (tile_bytes >= 8 << 10 or is_at_once or is_exhaustive)
        # A wide tile wants more threads, a narrow one fewer: the other pairings never won.
        is_paired = is_exhaustive or (num_warps == 8) == (tile_bytes > 16 << 10)
        if not is_exhaustive and (num_stages, programs) == (3, 2) and tile_bytes < 24 << 10:
            continue  # only for rows too long to keep more in flight
        if fits and is_good and is_paired:
            widths = (2048, 1024, 512) if is_exhaustive else (2048, 512)
            for block_k in sorted({min(whole_row, width) for width in widths}):
                found.append(LinearConfig(LinearKind.VECTOR, block_n, block_k, 1, num_warps, num_stages, programs))
    return found


def _tensor_core_candidates(problem: LinearProblem, is_exhaustive: bool) -> list[LinearConfig]:
    """Tiles of the tensor-core kernels; few turns of the loop win, for each waits for its rows of x."""
    halves, num_inputs = 2 if problem.shape.mode is LinearMode.GATED else 1, problem.shape.num_inputs
    if is_exhaustive:
        tiles = [
            (slices, block_n, block_k, num_stages)
            for slices, block_n, block_k, num_stages in itertools.product(
                (1, 2, 4, 8, 16), (16, 32, 64, 128), (64, 128, 256), (3, 4, 6)
            )
            if (block_n >= 64) == (slices == 1)
        ]
    else:
        tiles = [
            (4, 16, 256, 3), (4, 16, 256, 6), (8, 16, 256, 3), (8, 16, 128, 4), (4, 32, 64, 4), (4, 32, 128, 4),
            (8, 32, 64, 4), (4, 16, 128, 4), (8, 16, 64, 4), (16, 16, 64, 3), (16, 16, 128, 3),
        ]  # fmt: skip
    found = []
    for slices, block_n, block_k, most_stages in tiles:
        turns = runtime.cdiv(num_inputs, slices * block_k)
        if padded_columns(num_inputs, slices * block_k) >= 2 * num_inputs:
            continue  # half of the warps would have nothing to do
        num_stages = min(most_stages, turns + 1)
        ring = slices * block_n * halves * block_k * problem.dtype.itemsize * num_stages
        if ring <= _MAX_RING_BYTES and (ring >= 2 * _MIN_RING_BYTES or num_stages > turns):
            kind = LinearKind.WARPGROUP if slices == 1 else LinearKind.MMA
            found.append(LinearConfig(kind, block_n, block_k, slices, max(slices, 4), num_stages))
    return found


def _skinny_candidates(problem: LinearProblem, is_exhaustive: bool) -> list[LinearConfig]:
    """Tiles and splits that give each multiprocessor a program or two, with a ring that two programs share."""
    shape, num_rows = problem.shape, problem.num_rows
    halves = 2 if shape.mode is LinearMode.GATED else 1
    num_multiprocessors = runtime.num_multiprocessors(torch.device("cuda", 0))
    block_bs = sorted({min(size, max(16, runtime.next_power_of_2(num_rows))) for size in (64, 128, 256)})
    tiles_of_n = ((64, 4), (128, 4), (128, 8)) if is_exhaustive else ((64, 4), (128, 8 if num_rows > 32 else 4))
    found = []
    for block_b, (block_n, num_warps), block_k in itertools.product(block_bs, tiles_of_n, (64, 128)):
        if block_n * block_b * halves > 16384 * (num_warps // 4):
            continue
        tiles = runtime.cdiv(shape.num_outputs, block_n) * runtime.cdiv(num_rows, block_b)
        stage_bytes = (block_n * halves + block_b) * block_k * problem.dtype.itemsize
        for slices in _good_splits(shape, tiles, block_k, num_multiprocessors, is_exhaustive):
            # Programs that fit the card once over may have all the shared memory, else two share it.
            is_alone = tiles * slices <= num_multiprocessors * 1.1
            rings = (104 << 10, 200 << 10) if is_exhaustive else (_MAX_RING_BYTES if is_alone else 104 << 10,)
            for ring_bytes in rings:
                num_stages = min(ring_bytes // stage_bytes, shape.num_inputs // (slices * block_k), 10)
                if num_stages >= 2:
                    config = LinearConfig(LinearKind.SKINNY, block_n, block_k, slices, num_warps, num_stages)
                    found.append(replace(config, block_b=block_b, ahead_bytes=_AHEAD_BYTES))
    return found


def _described_candidates(problem: LinearProblem) -> list[LinearConfig]:
    """Tiles through tensor descriptors: without a thread's addresses there is room for larger ones."""
    shape, num_rows, device = problem.shape, problem.num_rows, torch.device("cuda", 0)
    if not runtime.has_tensor_descriptors(device):
        return []
    halves = 2 if shape.mode is LinearMode.GATED else 1
    num_multiprocessors = runtime.num_multiprocessors(device)
    block_bs = sorted({min(size, runtime.next_power_of_2(num_rows)) for size in (64, 128, 256)})
    block_k = 64  # a line of 128 bytes
    found = []
    for block_b, (block_n, num_warps), ring_bytes in itertools.product(
        block_bs, ((64, 4), (128, 4), (128, 8)), (104 << 10, 208 << 10)
    ):
        if block_n * block_b * halves > 16384 * (num_warps // 4):
            continue  # sums past 128 registers a thread
        stage_bytes = (block_n * halves + block_b) * block_k * problem.dtype.itemsize
        num_tiles = runtime.cdiv(shape.num_outputs, block_n) * runtime.cdiv(num_rows, block_b)
        for slices in _good_splits(shape, num_tiles, block_k, num_multiprocessors, is_exhaustive=False):
            num_stages = min(ring_bytes // stage_bytes, shape.num_inputs // (slices * block_k), 8)
            if num_stages >= 2:
                config = LinearConfig(LinearKind.SKINNY, block_n, block_k, slices, num_warps, num_stages)
                found.append(replace(config, block_b=block_b, is_described=True))
    return found


def _good_splits(
    shape: LinearShape, tiles: int, block_k: int, num_multiprocessors: int, is_exhaustive: bool
) -> list[int]:
    """Splits of K that come nearest to filling the card once, and twice; more of them when exhaustive."""
    possible = [
        slices
        for slices in ((1, 2, 4, 7, 8, 14, 16) if shape.mode is not LinearMode.ARGMAX else (1,))
        if shape.num_inputs % (slices * block_k) == 0 and shape.num_inputs >= 2 * slices * block_k
    ]
    if is_exhaustive or len(possible) <= 1:
        return possible
    return sorted(
        {min(possible, key=lambda slices: abs(tiles * slices - fill * num_multiprocessors)) for fill in (0.9, 1.9)}
    )


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
            attempt(linear_config.with_trigger(timing.config, 1 - timing.config.trigger))
    return sorted(timings, key=lambda timing: timing.time_us)
