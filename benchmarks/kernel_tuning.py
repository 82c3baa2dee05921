"""Measuring configurations of the GPU kernels on the card at hand; `kernel_steps.py --tune` is its command line."""

import os
from dataclasses import dataclass

import torch

from benchmarks.shapes import LLAMA_1B, LLAMA_8B, QWEN3_0_6B, SMOLLM2_135M
from graphrunner.kernels.triton import linear_config
from graphrunner.kernels.triton.attention_common import AttentionLayer, ExtendMetadata
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

MODELS = {"135M": SMOLLM2_135M, "0.6B": QWEN3_0_6B, "1B": LLAMA_1B, "8B": LLAMA_8B}
PAGE_SIZE = 16
CONTEXT = 1024
EXTEND_TOKENS = 8192
EXTEND_CONFIGS = (
    (64, 64, 4, 2, False), (64, 64, 4, 2, True), (64, 64, 4, 3, True), (64, 32, 4, 2, True), (64, 32, 4, 3, True),
    (64, 32, 4, 3, False),
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
        for timing in timings[1:4]:
            print(f"     then {timing.time_us:.1f} us {linear_config.config_to_row(timing.config)}", flush=True)
        table[_key(problem)] = row

    tune_decode_linear(problems, DEVICE, max(1, (os.cpu_count() or 2) - 1), report, is_exhaustive)
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
        # Causal: a token sees on average half of its prompt; two products of two operations each.
        lens = metadata.seq_lens.tolist()
        operations = sum(4 * length * (length + 1) / 2 for length in lens) * shape.heads * shape.head_dim
        for time_us, config in sorted(timings, key=lambda timing: timing[0]):
            print(f"extend {name}: {time_us:7.1f} us {operations / time_us / 1e6:4.0f} TFLOP/s {config}", flush=True)
