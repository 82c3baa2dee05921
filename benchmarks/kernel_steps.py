"""GPU kernels: correct against float32 twins, and a whole fused decode step in one CUDA graph against its floor.

    python benchmarks/kernel_steps.py            checks, then decode steps of three shapes at batches 1 to 256
    python benchmarks/kernel_steps.py --tune     measures configurations first, keeps them in the user's cache directory
                                                 and prints them in the form of kernels/triton/tuned_configs.py

The floor of a step is (bytes of weights + bytes of keys and values it reads) / the read bandwidth measured here.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.attention_tuning import tune_attention
from benchmarks.kernel_tuning import (
    CONTEXT,
    DEVICE,
    DTYPE,
    MODELS,
    PAGE_SIZE,
    Shape,
    tune_extend,
    tune_linears,
)
from graphrunner.kernels import reference
from graphrunner.kernels.triton import gpu_ops, linear_config
from graphrunner.kernels.triton.attention_common import AttentionLayer, DecodeMetadata, ExtendMetadata
from graphrunner.kernels.triton.linear_config import LinearMode, LinearShape

MAX_STEPS = 256


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
        gpu_ops.gather_decode_inputs(
            request_rows, self.last_token, self.num_computed, self.page_table, PAGE_SIZE, inputs
        )
        metadata = DecodeMetadata(inputs.positions, inputs.slot_mapping, inputs.seq_lens, request_rows, self.page_table)
        tokens = self.forward(inputs.input_ids, metadata)
        gpu_ops.advance_rows(request_rows, tokens, self.last_token, self.num_computed, self.ring, self.counter)

    def forward(self, input_ids: Tensor, metadata: DecodeMetadata) -> Tensor:
        """The likeliest token after each of a uniform step's."""
        s = self.shape
        hidden = gpu_ops.embedding(input_ids, self.head)
        for (qkv_w, o_w, gate_up_w, down_w), cache in zip(self.weights, self.caches, strict=True):
            qkv = gpu_ops.norm_linear(hidden, self.norm, s.eps, qkv_w)
            heads = gpu_ops.rope_store_attention(qkv, self.layer, *cache, metadata)
            hidden = gpu_ops.linear_residual(heads, o_w, None, hidden)
            gated = gpu_ops.norm_gate_up(hidden, self.norm, s.eps, gate_up_w, "silu")
            hidden = gpu_ops.linear_residual(gated, down_w, None, hidden)
        _, partials = gpu_ops.norm_linear_argmax(hidden, self.norm, s.eps, self.head)
        return gpu_ops.reduce_argmax(partials)


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
    parser.add_argument("--models", default="0.6B,1B,8B", help="comma-separated: 135M, 0.6B, 1B, 8B")
    parser.add_argument("--batches", default="1,2,4,8,16,64,256")
    parser.add_argument("--tune", action="store_true", help="measure configurations before the steps")
    parser.add_argument("--tune-rows", default="1,2,4,8,16")
    parser.add_argument("--tune-attention", default="1,4,16,32,64,128,192,256", help="batches; empty for none")
    parser.add_argument("--tune-extend", action="store_true", help="time tiles of the prompts' attention, too")
    parser.add_argument("--exhaustive", action="store_true", help="try every tile, also of shapes already tuned")
    parser.add_argument("--profile", action="store_true", help="print where the time of each step goes")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path, help="write all rows and tables here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures a CUDA device, and there is none")
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
