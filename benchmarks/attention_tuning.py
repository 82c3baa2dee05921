"""Measuring how decode attention is cut on the card at hand: equal sequences, and unequal ones as real batches have.

    python benchmarks/attention_tuning.py [--shapes 0.6B,1B,8B] [--batches 1,4,16,64,128,256]

Prints, for each size, what the configuration in use takes and what the best takes, and rows for
kernels/triton/tuned_configs.py. The best is so for the sum of both kinds of sequences. `kernel_steps.py --tune` runs
it, too.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_tuning import CONTEXT, DEVICE, DTYPE, MODELS, PAGE_SIZE, Shape
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
TILES = ((32, 2, 2), (32, 2, 5), (64, 2, 2), (64, 2, 4), (64, 2, 5), (64, 4, 3), (128, 4, 3))
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
    half = torch.ones(LONGEST + 1, shape.head_dim // 2, device=place)
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


def candidates(shape: Shape, batch: int) -> dict[DecodeAttentionConfig, Row]:
    """Configurations that differ, each with the row that yields it."""
    found: dict[DecodeAttentionConfig, Row] = {}
    num_multiprocessors = runtime.num_multiprocessors(DEVICE)
    for programs, least, (block_n, warps, stages) in product(PROGRAMS, MIN_SPLIT_TOKENS, TILES):
        if block_n * shape.head_dim * 4 * (stages - 1) > MAX_TILE_BYTES:
            continue
        splits = num_splits_for(programs * num_multiprocessors, batch * shape.kv_heads)
        if splits == 1 and least:
            continue
        row = (programs, block_n, warps, stages, least)
        found.setdefault(DecodeAttentionConfig(splits, block_n, warps, stages, least), row)
    return found


def _compile(job: tuple[Shape, bool, int, int, int]) -> str:
    shape, is_split, block_n, warps, stages = job
    problem = problem_of(shape, [CONTEXT], torch.device("meta"), 1)
    config = DecodeAttentionConfig(4 if is_split else 1, block_n, warps, stages)
    try:
        prepare_decode_attention(
            problem.qkv, problem.layer, problem.caches[0], problem.metadata, config, DEVICE, problem.qkv
        ).compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tune_attention(shapes: dict[str, Shape], batches: list[int]) -> dict[str, Row]:
    """Measure, print, and put into use; returns rows of TUNED_ATTENTION."""
    jobs = dict.fromkeys(
        (shape, config.num_splits > 1, config.block_n, config.num_warps, config.num_stages)
        for shape in shapes.values() for batch in batches for config in candidates(shape, batch)
    )  # fmt: skip
    compile_all(_compile, jobs, max(1, (os.cpu_count() or 2) - 1))
    table: dict[str, Row] = {}
    for name, shape in shapes.items():
        for batch in batches:
            key = attention_key(batch, shape.kv_heads, shape.head_dim, DEVICE, DTYPE)
            row = tune_batch(name, shape, batch)
            table.setdefault(key, row)  # shapes that share a key: the first decides
            TUNED_ATTENTION[key] = table[key]
    return table


def tune_batch(name: str, shape: Shape, batch: int) -> Row:
    """One size: prints the times of what is in use and of the best, returns the best's row."""
    layer_bytes = shape.kv_bytes(batch) // shape.layers
    num_layers = max(2, min(shape.layers, 24, CACHE_BYTES // layer_bytes))
    kinds = [[CONTEXT] * batch, unequal_lens(batch)][: 2 if batch > 1 else 1]
    problems = [problem_of(shape, lens, DEVICE, num_layers) for lens in kinds]

    def times_us(config: DecodeAttentionConfig) -> list[float]:
        return [time_in_graph(lambda problem=problem: problem.run(config), num_layers) for problem in problems]

    used = select_decode_config(batch, shape.kv_heads, shape.head_dim, DEVICE, DTYPE)
    used_us = times_us(used)
    timings = []
    for config, row in candidates(shape, batch).items():
        try:
            timings.append((times_us(config), config, row))
        except Exception:
            torch.cuda.synchronize()
    best_us, best, row = min(timings, key=lambda timing: sum(timing[0]))

    def line(times: list[float]) -> str:
        return " / ".join(f"{us:6.1f} us {layer_bytes / us / 1e6:.2f} TB/s" for us in times)

    print(f"attention {name} batch {batch}: in use {line(used_us)}  best {line(best_us)}  {best}", flush=True)
    for splits in sorted({config.num_splits for _, config, _ in timings}):
        of_splits = min((t for t in timings if t[1].num_splits == splits), key=lambda timing: sum(timing[0]))
        print(f"      {splits:3d} splits {line(of_splits[0])} {of_splits[2]}")
    return row


def main() -> None:
    """Tune the named shapes and print rows for the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.6B,1B,8B")
    parser.add_argument("--batches", default="1,4,16,64,128,256")
    args = parser.parse_args()
    shapes = {name: Shape.of(MODELS[name]) for name in args.shapes.split(",")}
    for key, row in tune_attention(shapes, [int(batch) for batch in args.batches.split(",")]).items():
        print(f'    "{key}": {row},')


if __name__ == "__main__":
    main()
