"""Measuring how decode attention is cut on the card at hand: equal sequences, unequal ones, and those of a real run.

    python benchmarks/attention_tuning.py [--shapes 0.6B,1B,8B] [--batches 1,16,64,192,224,256] [--programs 1,2]

Prints, for each size, what the configuration in use takes and what the best takes, and rows for
kernels/triton/tuned_configs.py. The best is so for all kinds of sequences and all shapes that share the row.
`kernel_steps.py --tune` runs it, too.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_tuning import CONTEXT, DEVICE, DTYPE, MODELS, PAGE_SIZE, Shape
from benchmarks.workload import FULL
from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.attention_common import AttentionLayer, DecodeMetadata
from graphrunner.kernels.triton.decode_attention import decode_attention, prepare_decode_attention
from graphrunner.kernels.triton.decode_attention_config import (
    DecodeAttentionConfig,
    attention_key,
    num_splits_for,
    select_decode_config,
)
from graphrunner.kernels.triton.linear_tuning import compile_all, time_in_graph
from graphrunner.kernels.triton.tuned_configs import TUNED_ATTENTION

LONGEST = CONTEXT * 7 // 4
TILES = (
    (32, 1, 2), (32, 1, 4), (32, 2, 2), (32, 2, 5), (64, 2, 2), (64, 2, 4), (64, 2, 5), (64, 4, 2), (64, 4, 3),
    (128, 4, 2), (128, 4, 3),
)  # fmt: skip
"""Tokens, warps, stages."""
MIN_SPLIT_TOKENS = (0, 256)
PROGRAMS = (1, 2, 4, 8, 16)
"""A multiprocessor, wanted."""
MAX_TILE_BYTES = 200 << 10
CACHE_BYTES = 512 << 20
"""Keys and values of a chain of layers: more than the L2 cache holds."""

Row = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Problem:
    """Decode attention of some layers over one batch."""

    qkv: Tensor
    layer: AttentionLayer
    caches: list[tuple[Tensor, Tensor]]
    metadata: DecodeMetadata

    def run(self, config: DecodeAttentionConfig | None) -> None:
        """All layers, one after another."""
        for cache in self.caches:
            decode_attention(self.qkv, self.layer, *cache, self.metadata, config)


def problem_of(shape: Shape, lens: list[int], place: torch.device, num_layers: int) -> Problem:
    """Operands for sequences of these lengths, their pages scattered."""
    batch, is_real = len(lens), place.type == "cuda"
    pages_per_row = -(-max(lens) // PAGE_SIZE)
    size = (1 + sum(-(-length // PAGE_SIZE) for length in lens), PAGE_SIZE, shape.kv_heads, shape.head_dim)
    caches = []
    for _ in range(num_layers):
        pair = torch.empty(size, dtype=DTYPE, device=place), torch.empty(size, dtype=DTYPE, device=place)
        caches.append((pair[0].normal_(), pair[1].normal_()) if is_real else pair)
    qkv = torch.ones(batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=DTYPE, device=place)
    half = torch.ones(2 * CONTEXT + 1, shape.head_dim // 2, device=place)
    norm = torch.ones(shape.head_dim, device=place) if shape.has_qk_norm else None
    layer = AttentionLayer(shape.head_dim**-0.5, half, half, norm, norm, shape.eps)
    table = torch.zeros(batch + 1, pages_per_row, dtype=torch.int32)
    order, taken, slots = torch.randperm(size[0] - 1) + 1, 0, []
    for row, length in enumerate(lens, 1):
        count = -(-length // PAGE_SIZE)
        table[row, :count] = order[taken : taken + count].int()
        slots.append(int(order[taken + count - 1]) * PAGE_SIZE + (length - 1) % PAGE_SIZE)
        taken += count
    seq_lens = torch.tensor(lens, dtype=torch.int32).to(place)
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=place)
    metadata = DecodeMetadata(seq_lens.long() - 1, torch.tensor(slots).to(place), seq_lens, rows, table.to(place))
    return Problem(qkv, layer, caches, metadata)


def unequal_lens(batch: int) -> list[int]:
    """Around CONTEXT on average, evenly spread, the longest first as decode rows are."""
    shortest = 2 * CONTEXT - LONGEST
    return [LONGEST - (LONGEST - shortest) * i // max(1, batch - 1) for i in range(batch)] if batch > 1 else [CONTEXT]


def offline_lens(batch: int) -> list[int]:
    """Of the requests of the offline workload, when `batch` of them are left, the longest first."""
    prompt_lens, output_lens = FULL.offline()
    step = sorted(output_lens, reverse=True)[batch - 1] - 1
    lens = [prompt + step for prompt, output in zip(prompt_lens, output_lens, strict=True) if output > step]
    return sorted(lens, reverse=True)[:batch]


def kinds_of(batch: int) -> list[list[int]]:
    """Lengths of the sequences of each kind of batch that is timed."""
    return [[CONTEXT] * batch, unequal_lens(batch), offline_lens(batch)][: 3 if batch > 1 else 1]


def candidates(shape: Shape, batch: int, wanted: Sequence[int]) -> dict[DecodeAttentionConfig, Row]:
    """Configurations that differ, each with the row that yields it."""
    found: dict[DecodeAttentionConfig, Row] = {}
    num_multiprocessors = runtime.num_multiprocessors(DEVICE)
    for programs, least, (block_n, warps, stages) in product(wanted, MIN_SPLIT_TOKENS, TILES):
        if block_n * shape.head_dim * 4 * (stages - 1) > MAX_TILE_BYTES:
            continue
        splits = num_splits_for(programs * num_multiprocessors, batch * shape.kv_heads)
        if splits == 1 and least:
            continue
        row = (programs, block_n, warps, stages, least)
        found.setdefault(DecodeAttentionConfig(splits, block_n, warps, stages, least), row)
    return found


def compile_cut(job: tuple[Shape, int, DecodeAttentionConfig, int]) -> str:
    """Compile the kernels of (shape, requests, configuration, tokens of each) in this process; returns the error."""
    shape, batch, config, width = job
    place = torch.device("meta")
    problem = problem_of(shape, [PAGE_SIZE] * batch, place, 1)
    if width > 1:
        tokens = torch.empty(batch * width, dtype=torch.int64, device=place)
        metadata = replace(problem.metadata, positions=tokens, slot_mapping=tokens)
        problem = replace(problem, qkv=problem.qkv.repeat(width, 1), metadata=metadata)
    try:
        launches = prepare_decode_attention(
            problem.qkv, problem.layer, problem.caches[0], problem.metadata, config, DEVICE, problem.qkv
        )
        for launch in launches:
            launch.compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tune_attention(shapes: dict[str, Shape], batches: list[int], wanted: Sequence[int] = PROGRAMS) -> dict[str, Row]:
    """Measure with each `wanted` number of programs, print, and put into use; returns rows of TUNED_ATTENTION."""
    jobs = [
        (shape, batch, replace(config, min_split_tokens=0), 1)
        for shape in shapes.values() for batch in batches for config in candidates(shape, batch, wanted)
    ]  # fmt: skip
    compile_all(compile_cut, dict.fromkeys(jobs), max(1, (os.cpu_count() or 2) - 1))
    table: dict[str, Row] = {}
    for batch in batches:
        alike: dict[str, list[tuple[str, Shape]]] = {}
        for name, shape in shapes.items():
            key = attention_key(batch, shape.kv_heads, shape.head_dim, DEVICE, DTYPE)
            alike.setdefault(key, []).append((name, shape))
        for key, sharing in alike.items():
            table[key] = TUNED_ATTENTION[key] = tune_batch(sharing, batch, wanted)
    return table


def tune_batch(sharing: list[tuple[str, Shape]], batch: int, wanted: Sequence[int]) -> Row:
    """One size of shapes that share a row: prints the times of what is in use and of the best, returns that row."""
    costs: dict[Row, list[float]] = {}
    lines: dict[Row, str] = {}
    for name, shape in sharing:
        used, timings = measure(shape, batch, wanted)
        least_us = min(sum(times) for times in timings.values())
        token_bytes = 4 * shape.kv_heads * shape.head_dim
        sizes = [token_bytes * sum(lens) for lens in kinds_of(batch)]
        print(f"attention {name} batch {batch}: in use {_line(used, sizes)}", flush=True)
        for row, times in timings.items():
            costs.setdefault(row, []).append(sum(times) / least_us)
            lines[row] = lines.get(row, "") + f"  {name} {_line(times, sizes)}"
    ranked = sorted((row for row in costs if len(costs[row]) == len(sharing)), key=lambda row: sum(costs[row]))
    for row in ranked[:4]:
        print(f"   {row!s:22s}{lines[row]}", flush=True)
    return ranked[0]


def _line(times: list[float], sizes: list[int]) -> str:
    return " / ".join(f"{us:6.1f} us {size / us / 1e6:.2f} TB/s" for us, size in zip(times, sizes, strict=True))


def measure(shape: Shape, batch: int, wanted: Sequence[int]) -> tuple[list[float], dict[Row, list[float]]]:
    """Microseconds a layer of the configuration in use and of each candidate, by kind of sequences."""
    num_layers = max(2, min(shape.layers, 24, CACHE_BYTES // (shape.kv_bytes(batch) // shape.layers)))
    problems = [problem_of(shape, lens, DEVICE, num_layers) for lens in kinds_of(batch)]

    def times_us(config: DecodeAttentionConfig) -> list[float]:
        return [time_in_graph(lambda problem=problem: problem.run(config), num_layers) for problem in problems]

    used = select_decode_config(batch, shape.kv_heads, shape.head_dim, DEVICE, DTYPE)
    times_us(used)  # the first is slow
    timings = {}
    for config, row in candidates(shape, batch, wanted).items():
        try:
            timings[row] = times_us(config)
        except Exception:
            torch.cuda.synchronize()
    return times_us(used), timings


def main() -> None:
    """Tune the named shapes and print rows for the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.6B,1B,8B")
    parser.add_argument("--batches", default="1,4,16,32,64,128,192,224,256")
    parser.add_argument("--programs", default="1,2,4,8,16", help="a multiprocessor, wanted")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures a CUDA device, and there is none")
    shapes = {name: Shape.of(MODELS[name]) for name in args.shapes.split(",")}
    batches, programs = ([int(number) for number in text.split(",")] for text in (args.batches, args.programs))
    for key, row in tune_attention(shapes, batches, programs).items():
        print(f'    "{key}": {row},')


if __name__ == "__main__":
    main()
