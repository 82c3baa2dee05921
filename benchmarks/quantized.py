"""Milliseconds a decode step through `LLM.generate`, host included, for each packing of the weights and of the cache.

    python benchmarks/quantized.py [--shapes 8B,1B] [--variants bf16,int4] [--json FILE] [--limit-s 85]

A step is (time of N + 1 tokens - time of 1 token) / N after a prompt of 960 tokens, the best of two. The floor is what
its weights and KV take to read, at the bandwidth that the same run measures. What does not fit the time limit is
left out, and named. `--products` times each projection alone instead, in a graph, beside the bandwidth.
"""

import argparse
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from benched_engine import BenchedEngine
from ceilings import Ceilings, measure_ceilings
from dummy_llm import build_llm
from packed_products import compile_ahead, product_table
from result_rows import Row, current_commit, merged, save_rows
from shapes import ALL_SHAPES, num_kv_bytes_per_token
from workload import FULL, TINY, Workload

from graphrunner.config.quantization import Quantization

NUM_STEPS = 64
NUM_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to keep the numbers."""

    name: str
    weights: Quantization = Quantization.NONE
    kv_cache_dtype: str = "auto"

    @property
    def options(self) -> dict[str, object]:
        """Of the engine."""
        return {"quantization": self.weights.value, "kv_cache_dtype": self.kv_cache_dtype}

    def read_bytes(self, config: dict, context_tokens: int, bytes_per_value: int) -> float:
        """Bytes that a step reads at least: projections, head, and the KV of all its requests."""
        hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        projections = config["num_hidden_layers"] * hidden * (2 * q + 2 * kv + 3 * ffn)
        size = self.weights.bytes_per_weight or bytes_per_value
        head_size = self.weights.of_head.bytes_per_weight or bytes_per_value
        kv_size = bytes_per_value if self.kv_cache_dtype == "auto" else 1
        kv_bytes = context_tokens * num_kv_bytes_per_token(config, kv_size)
        return projections * size + config["vocab_size"] * hidden * head_size + kv_bytes


VARIANTS = (
    Variant("bf16"),
    Variant("int8", Quantization.INT8),
    Variant("int4", Quantization.INT4),
    Variant("fp8", Quantization.FP8),
    Variant("fp8_block", Quantization.FP8_BLOCK),
    Variant("bf16 kv8", kv_cache_dtype="fp8"),
    Variant("int4 kv8", Quantization.INT4, "fp8"),
)


def decode_rows(shape: str, variant: Variant, device: str, load: Workload, ceilings: Ceilings) -> Iterator[Row]:
    """A row a batch size, of one engine."""
    batches = [batch for batch in load.batches if batch <= 64]
    sizes = {"decode_sizes": batches, "max_num_seqs": max(batches), "prefill_graph": "off"} if device == "cuda" else {}
    start_s = time.perf_counter()
    with build_llm(shape, device, sizes | variant.options) as llm:
        print(f"-- {shape} {variant.name}: engine after {time.perf_counter() - start_s:.1f} s", flush=True)
        bench = BenchedEngine(llm, shape, device, load, ceilings)
        num_steps = min(NUM_STEPS, load.num_steps)
        for batch in batches:
            bench.batch_seconds(batch, load.prompt_len, 2)
            first_s, whole_s = (
                min(bench.batch_seconds(batch, load.prompt_len, length) for _ in range(NUM_ROUNDS))
                for length in (1, num_steps + 1)
            )
            context = batch * (load.prompt_len + num_steps // 2)
            num_bytes = variant.read_bytes(bench.config, context, load.bytes_per_value)
            step_ms, floor_ms = 1e3 * (whole_s - first_s) / num_steps, 1e3 * num_bytes / ceilings.read_bytes_per_s
            yield Row.of(f"quantized/{shape}/{variant.name}/batch{batch}", step_ms, "ms", floor_ms)


def print_table(rows: list[Row], shapes: list[str], variants: list[Variant]) -> None:
    """Milliseconds, the share of the floor, and the speed beside bf16: a line a shape and batch."""
    by_name = {row.name: row for row in rows}
    width = 22
    print(f"\n{'ms a step (floor %, x bf16)':28s}" + "".join(f"{one.name:>{width}s}" for one in variants))
    for shape in shapes:
        batches = dict.fromkeys(row.name.rpartition("/")[2] for row in rows if row.name.split("/")[1] == shape)
        for batch in batches:
            base = by_name.get(f"quantized/{shape}/bf16/{batch}")
            cells = [_cell(by_name.get(f"quantized/{shape}/{one.name}/{batch}"), base) for one in variants]
            print(f"{shape + ' ' + batch:28s}" + "".join(f"{cell:>{width}s}" for cell in cells))


def _cell(row: Row | None, base: Row | None) -> str:
    if row is None:
        return "-"
    share = f"{row.floor_share:.0%}" if row.floor_share else ""
    gain = f"{base.value / row.value:.2f}x" if base else ""
    return f"{row.value:.3f} ({share}, {gain})"


def measure(args: argparse.Namespace, shapes: list[str], variants: list[Variant]) -> list[Row]:
    """All rows within the time limit."""
    begin_s = time.perf_counter()
    ceilings = measure_ceilings(args.device)
    print(f"read bandwidth {ceilings.read_bytes_per_s / 1e12:.3f} TB/s", flush=True)
    if args.device == "cuda":
        packings = sorted({one.weights for one in variants} - {Quantization.NONE}, key=lambda one: one.value)
        num_kernels = compile_ahead(shapes, packings, [1, 16, 64], max(1, (os.cpu_count() or 2) - 1))
        print(f"{num_kernels} products compiled after {time.perf_counter() - begin_s:.1f} s", flush=True)
    rows: list[Row] = []
    longest_s = 0.0
    commit = current_commit()
    for shape in shapes:
        load = TINY if shape == "tiny" else FULL
        for variant in variants:
            start_s = time.perf_counter()
            if start_s - begin_s + longest_s > args.limit_s:
                print(f"-- {shape} {variant.name}: left out, {args.limit_s:.0f} s are used up", flush=True)
                continue
            for row in decode_rows(shape, variant, args.device, load, ceilings):
                print(row, flush=True)
                rows.append(Row(row.name, row.value, row.unit, row.floor, commit=commit))
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            longest_s = max(longest_s, time.perf_counter() - start_s)
            if args.json:
                save_rows(args.json, merged([], rows))
    return rows


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="comma-separated, of 1B, 8B, 0.6B and tiny; by default 8B,1B, on a CPU tiny")
    parser.add_argument("--variants", default=",".join(one.name for one in VARIANTS), help="comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--limit-s", type=float, default=85.0, help="start no engine that would end later")
    parser.add_argument("--products", action="store_true", help="time the projections alone (CUDA)")
    args = parser.parse_args()
    shapes = (args.shapes or ("8B,1B" if args.device == "cuda" else "tiny")).split(",")
    names = args.variants.split(",")
    unknown = [name for name in shapes if name not in ALL_SHAPES]
    unknown += [name for name in names if name not in {one.name for one in VARIANTS}]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    variants = [one for one in VARIANTS if one.name in names]
    if args.products:
        product_table(shapes, [one.weights for one in variants], args.limit_s)
        return
    print_table(measure(args, shapes, variants), shapes, variants)


if __name__ == "__main__":
    main()
