"""GPU kernels: correct against float32 twins, and a whole fused decode step in one CUDA graph against its floor.

    python benchmarks/kernels.py            checks, then decode steps of three shapes at batches 1 to 256
    python benchmarks/kernels.py --tune     measures configurations first, keeps them in the user's cache directory
                                            and prints them in the form of kernels/triton/tuned_configs.py

The floor of a step is (bytes of weights + bytes of keys and values it reads) / the read bandwidth measured here.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import LLAMA_1B, LLAMA_8B, QWEN3_0_6B
from graphrunner.kernels import reference
from graphrunner.kernels.triton import decode_attention as decode_attention_module
from graphrunner.kernels.triton import gpu_ops, linear_config, runtime
from graphrunner.kernels.triton.attention_common import AttentionLayer, DecodeMetadata, ExtendMetadata
from graphrunner.kernels.triton.decode_attention import DecodeAttentionConfig, decode_attention
from graphrunner.kernels.triton.linear_config import LinearMode, LinearShape
from graphrunner.kernels.triton.linear_tuning import (
    LinearProblem,
    LinearTiming,
    compile_all,
    time_in_graph,
    tune_decode_linear,
)
from graphrunner.kernels.triton.prefill_attention import ExtendConfig, prepare_extend_attention
from graphrunner.kernels.triton.tuned_configs import TUNED_LINEAR

MODELS = {"0.6B": QWEN3_0_6B, "1B": LLAMA_1B, "8B": LLAMA_8B}
PAGE_SIZE = 16
CONTEXT = 1024
MAX_STEPS = 256
EXTEND_TOKENS = 8192
EXTEND_CONFIGS = (
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (64, 128, 8, 2),
)  # fmt: skip
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Shape:
    """Sizes of one model, from its Hugging Face configuration."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    has_qk_norm: bool
    eps: float

    @classmethod
    def of(cls, config: dict) -> "Shape":
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden, config["num_hidden_layers"], heads, config["num_key_value_heads"],
            config.get("head_dim", hidden // heads), config["intermediate_size"], config["vocab_size"],
            config["model_type"] == "qwen3", config["rms_norm_eps"],
        )  # fmt: skip

    @property
    def linears(self) -> list[LinearShape]:
        """The projections of a layer and the head, as the tuner names them."""
        return [
            LinearShape(LinearMode.PLAIN, (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            LinearShape(LinearMode.RESIDUAL, self.hidden, self.heads * self.head_dim),
            LinearShape(LinearMode.GATED, self.ffn, self.hidden),
            LinearShape(LinearMode.RESIDUAL, self.hidden, self.ffn),
            LinearShape(LinearMode.ARGMAX, self.vocab, self.hidden),
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights one decode step reads."""
        of = {LinearMode.GATED: 2}
        sizes = [of.get(s.mode, 1) * s.num_outputs * s.num_inputs * 2 for s in self.linears]
        return self.layers * sum(sizes[:4]) + sizes[4]

    def kv_bytes(self, batch: int) -> int:
        """Bytes of keys and values one decode step reads."""
        return batch * CONTEXT * self.layers * 2 * self.kv_heads * self.head_dim * 2


@dataclass
class Model:
    """Random weights and caches of one shape, and the device rows of a batch."""

    shape: Shape
    max_batch: int
    weights: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        for _ in range(s.layers):
            self.weights.append(tuple(self._random(*self._size(linear)) for linear in s.linears[:4]))
        self.head = self._random(s.vocab, s.hidden)
        self.norm = torch.ones(s.hidden, device=DEVICE)
        angles = torch.rand(CONTEXT + MAX_STEPS + 1, s.head_dim // 2, device=DEVICE) * 6
        head_norm = torch.ones(s.head_dim, device=DEVICE) if s.has_qk_norm else None
        self.layer = AttentionLayer(s.head_dim**-0.5, angles.cos(), angles.sin(), head_norm, head_norm, s.eps)
        pages_per_row = -(-(CONTEXT + MAX_STEPS) // PAGE_SIZE)
        num_pages = 1 + self.max_batch * pages_per_row
        size = (num_pages, PAGE_SIZE, s.kv_heads, s.head_dim)
        self.caches = [(self._random(*size, std=1.0), self._random(*size, std=1.0)) for _ in range(s.layers)]
        self.page_table = torch.zeros(self.max_batch + 1, pages_per_row, dtype=torch.int32, device=DEVICE)
        self.page_table[1:] = (torch.randperm(num_pages - 1, device=DEVICE) + 1).view(self.max_batch, -1)
        self.last_token = torch.randint(0, s.vocab, (self.max_batch + 1,), dtype=torch.int32, device=DEVICE)
        self.num_computed = torch.zeros(self.max_batch + 1, dtype=torch.int32, device=DEVICE)
        self.ring = torch.zeros(4, self.max_batch, dtype=torch.int32, device=DEVICE)
        self.counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    @staticmethod
    def _size(linear: LinearShape) -> tuple[int, int]:
        return linear.num_outputs * (2 if linear.mode is LinearMode.GATED else 1), linear.num_inputs

    @staticmethod
    def _random(*size: int, std: float = 0.02) -> Tensor:
        return torch.empty(*size, dtype=DTYPE, device=DEVICE).normal_(0, std)

    def reset(self) -> None:
        """Put every row back to the context length."""
        self.num_computed.fill_(CONTEXT - 1)
        self.num_computed[0] = 0

    def step(self, request_rows: Tensor, inputs: gpu_ops.DecodeInputs) -> None:
        """One decode step, as a captured graph runs it."""
        s = self.shape
        gpu_ops.gather_decode_inputs(
            request_rows, self.last_token, self.num_computed, self.page_table, PAGE_SIZE, inputs
        )
        metadata = DecodeMetadata(inputs.positions, inputs.slot_mapping, inputs.seq_lens, request_rows, self.page_table)
        hidden = gpu_ops.embedding(inputs.input_ids, self.head)
        for (qkv_w, o_w, gate_up_w, down_w), cache in zip(self.weights, self.caches, strict=True):
            qkv = gpu_ops.norm_linear(hidden, self.norm, s.eps, qkv_w)
            heads = gpu_ops.rope_store_attention(qkv, self.layer, *cache, metadata)
            hidden = gpu_ops.linear_residual(heads, o_w, None, hidden)
            gated = gpu_ops.norm_gate_up(hidden, self.norm, s.eps, gate_up_w, "silu")
            hidden = gpu_ops.linear_residual(gated, down_w, None, hidden)
        _, partials = gpu_ops.norm_linear_argmax(hidden, self.norm, s.eps, self.head)
        tokens = gpu_ops.reduce_argmax(partials)
        gpu_ops.advance_rows(request_rows, tokens, self.last_token, self.num_computed, self.ring, self.counter)


def new_inputs(batch: int) -> gpu_ops.DecodeInputs:
    """Static buffers of one captured batch size."""

    def make(dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch, dtype=dtype, device=DEVICE)

    return gpu_ops.DecodeInputs(make(torch.int32), make(torch.int64), make(torch.int32), make(torch.int64))


def capture_step(model: Model, batch: int) -> torch.cuda.CUDAGraph:
    """A decode step in one graph."""
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=DEVICE)
    inputs = new_inputs(batch)
    model.reset()
    for _ in range(2):
        model.step(rows, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step(rows, inputs)
    model.reset()
    return graph


def profile_step(model: Model, batch: int) -> list[tuple[str, int, float]]:
    """Device time of one replay by kernel: (name, launches, microseconds), longest first."""
    graph = capture_step(model, batch)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    rows = [(event.key, event.count // 3, event.self_device_time_total / 3) for event in profile.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def time_step(model: Model, batch: int) -> float:
    """Milliseconds a replay of one captured decode step takes: the median of 30."""
    graph = capture_step(model, batch)
    times = []
    for _ in range(40):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[10:])[15]


def read_bandwidth_tb_s() -> float:
    """Bytes a reduction reads over its time, best of 5, in TB/s."""
    data = torch.empty(1 << 30, dtype=torch.int32, device=DEVICE).random_()
    copy = torch.empty(1 << 29, dtype=torch.int32, device=DEVICE)
    best = 0.0
    for run, moved in ((lambda: torch.sum(data), 4 << 30), (lambda: copy.copy_(data[: 1 << 29]), 4 << 30)):
        for _ in range(5):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            best = max(best, moved / start.elapsed_time(stop) / 1e9)
    return best


def _relative_error(value: Tensor, wanted: Tensor) -> float:
    return float((value.double() - wanted.double()).norm() / wanted.double().norm())


def check_linears(shape: Shape, num_rows: int) -> float:
    """Largest relative error of the four projections and the head against float32 twins."""
    worst = 0.0
    for linear in shape.linears:
        weight = Model._random(*Model._size(linear))
        x = Model._random(num_rows, linear.num_inputs, std=1.0)
        norm = torch.rand(linear.num_inputs, device=DEVICE) + 0.5
        residual = Model._random(num_rows, linear.num_outputs, std=1.0)
        if linear.mode is LinearMode.RESIDUAL:
            wanted = reference.linear_residual(x.float(), weight.float(), None, residual.float())
            value = gpu_ops.linear_residual(x, weight, None, residual)
        elif linear.mode is LinearMode.GATED:
            wanted = reference.norm_gate_up(x.float(), norm, 1e-6, weight.float(), "silu")
            value = gpu_ops.norm_gate_up(x, norm, 1e-6, weight, "silu")
        else:
            wanted = reference.norm_linear(x.float(), norm, 1e-6, weight.float())
            value, partials = gpu_ops.norm_linear_argmax(x, norm, 1e-6, weight)
            assert torch.equal(gpu_ops.reduce_argmax(partials).long(), value.float().argmax(-1)), "arg-max"
            plain = gpu_ops.norm_linear(x, norm, 1e-6, weight)
            worst = max(worst, _relative_error(plain, wanted))
        worst = max(worst, _relative_error(value, wanted))
    return worst


def check_attention(shape: Shape, query_lens: list[int], cached_lens: list[int], is_decode: bool) -> float:
    """Relative error of one attention layer against the float32 twin; unowned pages hold NaN."""
    num_requests, d, hk = len(query_lens), shape.head_dim, shape.kv_heads
    seq = torch.tensor(query_lens) + torch.tensor(cached_lens)
    max_pages = -(-int(seq.max()) // PAGE_SIZE)
    num_pages = 1 + num_requests * max_pages
    caches = [torch.full((num_pages, PAGE_SIZE, hk, d), float("nan"), dtype=DTYPE) for _ in range(2)]
    order, table = torch.randperm(num_pages - 1).int() + 1, torch.zeros(num_requests + 1, max_pages, dtype=torch.int32)
    slots, positions = [], []
    for r, (length, cached) in enumerate(zip(seq.tolist(), cached_lens, strict=True)):
        owned = -(-length // PAGE_SIZE)
        table[r + 1, :owned] = order[r * max_pages : r * max_pages + owned]
        where = torch.arange(length)
        slot = table[r + 1].long()[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE
        for cache in caches:
            cache.view(-1, hk, d)[slot[:cached]] = torch.randn(cached, hk, d).to(DTYPE)
        slots.append(slot[cached:])
        positions.append(where[cached:])
    k_cache, v_cache = (cache.to(DEVICE) for cache in caches)
    qkv = Model._random(sum(query_lens), (shape.heads + 2 * hk) * d, std=1.0)
    angles = torch.rand(int(seq.max()) + 1, d // 2, device=DEVICE) * 6
    norm = torch.rand(d, device=DEVICE) + 0.5 if shape.has_qk_norm else None
    layer = AttentionLayer(d**-0.5, angles.cos(), angles.sin(), norm, norm)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
    common = (
        torch.cat(positions).to(DEVICE), torch.cat(slots).to(DEVICE), seq.int().to(DEVICE),
        torch.arange(1, num_requests + 1, dtype=torch.int32, device=DEVICE), table.to(DEVICE),
    )  # fmt: skip
    wanted = reference.rope_store_attention(
        qkv.float(), layer.cos, layer.sin, norm, norm, layer.norm_eps, k_cache.float(), v_cache.float(), common[0],
        common[1], starts, *common[2:], layer.scale,
    )  # fmt: skip
    metadata = DecodeMetadata(*common) if is_decode else ExtendMetadata(*common, starts)
    return _relative_error(gpu_ops.rope_store_attention(qkv, layer, k_cache, v_cache, metadata), wanted)


def run_checks(shapes: dict[str, Shape]) -> int:
    """Print one line a check; returns how many failed."""
    cases: list[tuple[str, Callable[[], float]]] = []
    for name, shape in shapes.items():
        for rows in (1, 2, 3, 8, 16, 40):
            cases.append((f"{name} linears, {rows} rows", lambda s=shape, r=rows: check_linears(s, r)))
        cases += [
            (f"{name} decode", lambda s=shape: check_attention(s, [1] * 3, [1023, 5, 300], True)),
            (f"{name} decode, 40 rows", lambda s=shape: check_attention(s, [1] * 40, list(range(20, 60)), True)),
            (f"{name} verify 5", lambda s=shape: check_attention(s, [5] * 2, [700, 11], True)),
            (f"{name} long decode", lambda s=shape: check_attention(s, [1], [20000], True)),
            (f"{name} extend", lambda s=shape: check_attention(s, [200, 1, 64, 17], [0, 700, 90, 3], False)),
        ]
    failed = 0
    for label, case in cases:
        try:
            torch.manual_seed(len(label))
            error = case()
            is_right = error < 1e-2
            print(f"check {label:28s} relative error {error:.1e} {'ok' if is_right else 'WRONG'}", flush=True)
        except Exception as problem:
            is_right = False
            print(f"check {label:28s} FAILED {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            traceback.print_exc(limit=3)
        failed += not is_right
    return failed


def _key(problem: LinearProblem) -> str:
    return linear_config.config_key(DEVICE, problem.dtype, problem.shape, problem.num_rows)


def tune_linears(shapes: dict[str, Shape], row_counts: list[int], is_exhaustive: bool) -> dict[str, tuple]:
    """Measure every projection; print the winners; returns rows of TUNED_LINEAR."""
    problems = [LinearProblem(linear, rows) for s in shapes.values() for linear in s.linears for rows in row_counts]
    if not is_exhaustive:
        # What the shipped table holds was measured on such a card.
        problems = [p for p in problems if _key(p) not in TUNED_LINEAR]
    problems = list(dict.fromkeys(problems))
    table: dict[str, tuple] = {}

    def report(problem: LinearProblem, timings: list[LinearTiming]) -> None:
        best = timings[0]
        by_kind: dict[str, float] = {}
        for timing in timings:
            by_kind.setdefault(timing.config.kind.value, round(timing.time_us, 1))
        sizes = f"{problem.shape.mode.name.lower()} {problem.shape.num_outputs}x{problem.shape.num_inputs}"
        row = linear_config.config_to_row(best.config)
        print(f"tune {sizes} rows {problem.num_rows} {best.bandwidth_tb_s:.2f} TB/s {by_kind} {row}", flush=True)
        table[_key(problem)] = row

    tune_decode_linear(problems, DEVICE, max(1, (os.cpu_count() or 2) - 1), report, is_exhaustive)
    return table


def _attention_problem(shape: Shape, batch: int, place: torch.device, layers: int):
    """Operands of decode attention at the benchmark's context."""
    pages_per_row = CONTEXT // PAGE_SIZE
    num_pages = 1 + batch * pages_per_row
    size = (num_pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    real = place.type == "cuda"
    caches = [
        tuple(torch.empty(size, dtype=DTYPE, device=place).normal_() for _ in range(2))
        for _ in range(layers)
    ]  # fmt: skip
    qkv = torch.ones(batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=DTYPE, device=place)
    half = torch.ones(CONTEXT + 1, shape.head_dim // 2, device=place)
    norm = torch.ones(shape.head_dim, device=place) if shape.has_qk_norm else None
    layer = AttentionLayer(shape.head_dim**-0.5, half, half, norm, norm, shape.eps)
    table = torch.zeros(batch + 1, pages_per_row, dtype=torch.int32, device=place)
    last = torch.full((batch,), CONTEXT - 1, dtype=torch.int64, device=place)
    slots = torch.zeros(batch, dtype=torch.int64, device=place)
    if real:
        table[1:] = (torch.randperm(num_pages - 1, device=place) + 1).view(batch, -1)
        slots = table[1:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=place)
    metadata = DecodeMetadata(last, slots, (last + 1).int(), rows, table)
    return qkv, layer, caches, metadata


def _compile_attention(job: tuple[Shape, int, DecodeAttentionConfig]) -> str:
    shape, batch, config = job
    meta = torch.device("meta")
    try:
        qkv, layer, caches, metadata = _attention_problem(shape, batch, meta, 1)
        dtype = torch.float32 if config.num_splits > 1 else DTYPE
        out = torch.empty(1, dtype=dtype, device=meta)
        decode_attention_module.prepare_decode_attention(
            qkv, layer, caches[0], metadata, config, DEVICE, (out, out)
        ).compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tune_attention(shapes: dict[str, Shape], batches: list[int]) -> dict[str, tuple]:
    """Measure tiles and splits of decode attention; returns rows of TUNED_ATTENTION."""
    jobs, table = {}, {}
    sms = runtime.num_multiprocessors(DEVICE)
    for shape in shapes.values():
        for batch in batches:
            for programs in (1, 2, 4, 8, 16, 32):
                splits = decode_attention_module._num_splits(programs * sms, batch * shape.kv_heads)
                for block_n in (32, 64, 128):
                    for warps in (2, 4, 8):
                        for stages in (2, 3, 4, 5):
                            if block_n * shape.head_dim * 4 * (stages - 1) <= 200 << 10:
                                config = DecodeAttentionConfig(splits, block_n, warps, stages)
                                jobs.setdefault((shape, batch, config), programs)
    compiled = {(s, c.num_splits > 1, c.block_n, c.num_warps, c.num_stages): (s, b, c) for s, b, c in jobs}
    compile_all(_compile_attention, compiled.values(), max(1, (os.cpu_count() or 2) - 1))
    for shape in shapes.values():
        for batch in batches:
            layers = max(2, min(shape.layers, 24, (512 << 20) // (shape.kv_bytes(batch) // shape.layers)))
            qkv, layer, caches, metadata = _attention_problem(shape, batch, DEVICE, layers)
            timings = []
            for (s, b, config), programs in jobs.items():
                if (s, b) != (shape, batch):
                    continue
                try:

                    def chain(config=config, caches=caches, qkv=qkv, layer=layer, metadata=metadata):
                        for cache in caches:
                            decode_attention(qkv, layer, *cache, metadata, config)

                    timings.append((time_in_graph(chain, layers), programs, config))
                except Exception:
                    torch.cuda.synchronize()
            timings.sort(key=lambda timing: timing[0])
            time_us, programs, config = timings[0]
            rate = shape.kv_bytes(batch) / shape.layers / time_us / 1e6
            sizes = f"{shape.kv_heads}x{shape.head_dim} batch {batch}"
            worst_us = timings[-1][0]
            print(f"tune attention {sizes}: {time_us:.1f} us {rate:.2f} TB/s {config} worst {worst_us:.1f}", flush=True)
            key = decode_attention_module.attention_key(batch, shape.kv_heads, shape.head_dim, DEVICE, DTYPE)
            table[key] = (programs, config.block_n, config.num_warps, config.num_stages)
            decode_attention_module.TUNED_ATTENTION[key] = table[key]
    return table


def _extend_problem(shape: Shape, place: torch.device):
    """Operands of a chunk of EXTEND_TOKENS tokens: prompts of 960 that begin in it."""
    lens = [960] * (EXTEND_TOKENS // 960) + [EXTEND_TOKENS % 960]
    qkv = torch.empty(EXTEND_TOKENS, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=DTYPE, device=place)
    pages_per_row = 60
    size = (1 + len(lens) * pages_per_row, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    caches = tuple(torch.empty(size, dtype=DTYPE, device=place) for _ in range(2))
    for tensor in (qkv, *caches) if place.type == "cuda" else ():
        tensor.normal_()
    layer = AttentionLayer(shape.head_dim**-0.5)
    rows = torch.arange(1, len(lens) + 1, dtype=torch.int32, device=place)
    table = (torch.arange((len(lens) + 1) * pages_per_row, dtype=torch.int32, device=place) + 1 - pages_per_row).view(
        -1, pages_per_row
    )
    starts = torch.tensor([0, *lens]).cumsum(0).int().to(place)
    unused = torch.zeros(EXTEND_TOKENS, dtype=torch.int64, device=place)
    metadata = ExtendMetadata(unused, unused, torch.tensor(lens).int().to(place), rows, table, starts)
    return qkv, layer, caches, metadata


def _compile_extend(job: tuple[Shape, ExtendConfig]) -> str:
    shape, config = job
    qkv, layer, caches, metadata = _extend_problem(shape, torch.device("meta"))
    try:
        prepare_extend_attention(qkv, layer, caches, metadata, config, DEVICE, qkv).compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tune_extend(shapes: dict[str, Shape]) -> None:
    """Time tiles of the prompts' flash pass, and print them, best first."""
    configs = [ExtendConfig(*row) for row in EXTEND_CONFIGS]
    errors = compile_all(_compile_extend, [(s, c) for s in shapes.values() for c in configs], os.cpu_count() or 1)
    for name, shape in shapes.items():
        qkv, layer, caches, metadata = _extend_problem(shape, DEVICE)
        out = torch.empty(EXTEND_TOKENS, shape.heads * shape.head_dim, dtype=DTYPE, device=DEVICE)
        timings = []
        for config in configs:
            if errors[shape, config]:
                continue
            launch = prepare_extend_attention(qkv, layer, caches, metadata, config, DEVICE, out)
            try:
                timings.append((time_in_graph(lambda launch=launch: [launch.run() for _ in range(8)], 8), config))
            except Exception:
                torch.cuda.synchronize()
        for time_us, config in sorted(timings, key=lambda timing: timing[0]):
            print(f"extend {name}: {time_us:7.1f} us {config}", flush=True)


def run_steps(shapes: dict[str, Shape], batches: list[int], bandwidth: float, is_profiled: bool) -> list[dict]:
    """Time whole steps; one row a (shape, batch)."""
    rows = []
    for name, shape in shapes.items():
        if not batches:
            break
        model = Model(shape, max(batches))
        for batch in batches:
            floor = (shape.weight_bytes + shape.kv_bytes(batch)) / bandwidth / 1e9
            try:
                milliseconds = time_step(model, batch)
            except Exception as problem:
                torch.cuda.synchronize()
                print(f"step {name} batch {batch} FAILED {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                continue
            if is_profiled:
                for kernel, count, time_us in profile_step(model, batch)[:12]:
                    print(f"    {time_us:9.1f} us {count:4d} x {kernel[:90]}")
            rows.append({"name": f"kernels/{name}/batch{batch}", "value": round(milliseconds, 4), "unit": "ms",
                         "floor": round(floor, 4)})  # fmt: skip
            print(f"step {name:5s} batch {batch:3d} {milliseconds:8.3f} ms, floor {floor:7.3f}, "
                  f"{100 * floor / milliseconds:3.0f} %", flush=True)  # fmt: skip
        del model
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6B,1B,8B", help="comma-separated: 0.6B, 1B, 8B")
    parser.add_argument("--batches", default="1,2,4,8,16,64,256")
    parser.add_argument("--tune", action="store_true", help="measure configurations before the steps")
    parser.add_argument("--tune-rows", default="1,2,4,8,16")
    parser.add_argument("--tune-attention", default="1,4,16,64,256", help="batches; empty for none")
    parser.add_argument("--tune-extend", action="store_true", help="time tiles of the prompts' attention, too")
    parser.add_argument("--exhaustive", action="store_true", help="try every tile, also of shapes already tuned")
    parser.add_argument("--profile", action="store_true", help="print where the time of each step goes")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path, help="write all rows and tables here")
    arguments = parser.parse_args()
    started = time.time()
    shapes = {name: Shape.of(MODELS[name]) for name in arguments.models.split(",")}
    batches = [int(batch) for batch in arguments.batches.split(",") if batch]
    bandwidth = read_bandwidth_tb_s()
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth:.2f} TB/s, torch {torch.__version__}")
    failed = 0 if arguments.no_check else run_checks(shapes)
    print(f"phase checks done at {time.time() - started:.0f} s", flush=True)
    tables: dict[str, dict[str, tuple]] = {}
    if arguments.tune_extend:
        tune_extend(shapes)
    if arguments.tune:
        tables["linear"] = tune_linears(
            shapes, [int(rows) for rows in arguments.tune_rows.split(",")], arguments.exhaustive
        )
        print(f"phase linears tuned at {time.time() - started:.0f} s", flush=True)
        if arguments.tune_attention:
            tuned_batches = [int(batch) for batch in arguments.tune_attention.split(",")]
            tables["attention"] = tune_attention(shapes, tuned_batches)
        linear_config.save_overrides(linear_config.default_tuning_path())
        print(f"phase attention tuned at {time.time() - started:.0f} s", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"tables": tables}))
    rows = run_steps(shapes, batches, bandwidth, arguments.profile)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "tables": tables}))
    print(f"done in {time.time() - started:.0f} s; {failed} checks failed")
    for row in rows:
        print(f"{row['name']:28s} {row['value']:8.3f} {row['unit']}  floor {row['floor']:7.3f}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
