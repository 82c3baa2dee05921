"""Projections of a model by packed weights, one at a time: compiled side by side, and timed beside the memory."""

import os
import time
from dataclasses import dataclass, replace

import torch
from ceilings import measure_ceilings
from shapes import ALL_SHAPES

from graphrunner.config.quantization import Quantization
from graphrunner.kernels.packed_weight import Weight, dense_weight
from graphrunner.weights.quantize import quantize

BATCHES = (1, 4, 16, 32, 64, 128, 256)
_CHAIN_BYTES = 1 << 30  # more than any cache holds
_LONGEST_CHAIN = 24


@dataclass(frozen=True, slots=True)
class Product:
    """One projection at one batch size.

    Attributes:
        mode: name of a LinearMode.
        num_rows: of the weight; both halves when GATED.
        width: K.
        count: how often a step has it.
    """

    label: str
    mode: str
    num_rows: int
    width: int
    count: int
    packing: Quantization
    batch: int


def products(config: dict, packing: Quantization, batch: int) -> list[Product]:
    """The five of a decoder."""
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return [
        Product("qkv", "PLAIN", q + 2 * kv, hidden, layers, packing, batch),
        Product("o", "RESIDUAL", hidden, q, layers, packing, batch),
        Product("gate_up", "GATED", 2 * ffn, hidden, layers, packing, batch),
        Product("down", "RESIDUAL", hidden, ffn, layers, packing, batch),
        Product("head", "PLAIN", config["vocab_size"], hidden, 1, packing.of_head, batch),
    ]


def compile_ahead(shapes: list[str], packings: list[Quantization], batches: list[int], num_processes: int) -> int:
    """Fill Triton's cache with what these models will launch, side by side; how many products."""
    from graphrunner.kernels.triton.linear_tuning import compile_all

    jobs = {
        replace(product, label="", count=1)
        for shape in shapes
        for packing in packings
        for batch in batches
        for product in products(ALL_SHAPES[shape], packing, batch)
    }
    for job, error in compile_all(compile_product, jobs, num_processes).items():
        if error:
            print(f"not compiled ahead: {job}: {error[:200]}", flush=True)
    return len(jobs)


def compile_product(product: Product) -> str:
    """In a process of its own; returns the error's text, empty when there is none."""
    from graphrunner.kernels.triton import quantized_linear
    from graphrunner.kernels.triton.quantized_config import PackedKind, select_packed_config

    try:
        weight = meta_weight(product)
        config = select_packed_config(weight, product.batch, torch.bfloat16, product.mode == "GATED")
        if config.kind is PackedKind.WIDEN:
            return ""
        call = call_of(product, weight, torch.device("meta"))
        if config.kind is PackedKind.TILE:
            call = replace(call, norm_weight=None)
        for launch in quantized_linear.prepare(call, config, torch.device("cuda", 0)):
            launch.compile()
    except Exception as error:  # told, and met again by the engine
        return f"{type(error).__name__}: {error}"
    return ""


def meta_weight(product: Product) -> Weight:
    """The packed weight's shapes, without memory."""
    few = quantize(torch.zeros(128, product.width), product.packing)

    def like(one: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        return None if one is None else torch.empty(rows, one.shape[1], dtype=one.dtype, device="meta")

    num_blocks = -(-product.num_rows // few.row_block)
    data = like(few.data, product.num_rows)
    assert data is not None
    return replace(few, data=data, scale=like(few.scale, num_blocks), zero=like(few.zero, product.num_rows))


def call_of(product: Product, weight: Weight, device: torch.device):
    """Operands around a weight, as a decoder has them."""
    from graphrunner.kernels.triton.linear_config import LinearMode
    from graphrunner.kernels.triton.quantized_linear import PackedCall

    mode = LinearMode[product.mode]
    num_outputs = product.num_rows // (2 if mode is LinearMode.GATED else 1)
    x = torch.zeros(product.batch, product.width, dtype=torch.bfloat16, device=device)
    out = torch.zeros(product.batch, num_outputs, dtype=torch.bfloat16, device=device)
    norm = torch.ones(product.width, device=device) if mode is not LinearMode.RESIDUAL else None
    return PackedCall(mode, x, norm, 1e-6, weight, None, out, out)


def time_product(product: Product) -> tuple[float, float]:
    """(microseconds, bytes of the weight) in a graph of many copies of the weight."""
    from graphrunner.kernels.triton.linear_tuning import time_in_graph
    from graphrunner.layers import ops

    device = torch.device("cuda")
    dense = torch.randn(product.num_rows, product.width, dtype=torch.bfloat16, device=device) * 0.02
    is_dense = product.packing is Quantization.NONE
    first = dense_weight(dense) if is_dense else quantize(dense, product.packing)
    copies = max(2, min(_LONGEST_CHAIN, _CHAIN_BYTES // first.num_bytes))
    weights = [first] + [
        replace(first, data=first.data.view(torch.uint8).clone().view(first.data.dtype)) for _ in range(copies - 1)
    ]
    call = call_of(product, first, device)

    def chain() -> None:
        for weight in weights:
            if product.mode == "PLAIN":
                ops.norm_linear(call.x, call.norm_weight, 1e-6, weight, None)
            elif product.mode == "GATED":
                ops.norm_gate_up(call.x, call.norm_weight, 1e-6, weight, "silu")
            else:
                ops.linear_residual(call.x, weight, None, call.out)

    return time_in_graph(chain, copies), float(first.num_bytes)


def product_table(shapes: list[str], packings: list[Quantization], limit_s: float) -> None:
    """Microseconds and the share of the read bandwidth of every product; then the sum over a step."""
    begin_s = time.perf_counter()
    bandwidth = measure_ceilings("cuda").read_bytes_per_s
    packings = list(dict.fromkeys(packings))
    packed = [one for one in packings if one is not Quantization.NONE]
    compile_ahead(shapes, packed, list(BATCHES), max(1, (os.cpu_count() or 2) - 1))
    print(
        f"compiled after {time.perf_counter() - begin_s:.1f} s; us (share of {bandwidth / 1e12:.2f} TB/s)", flush=True
    )
    labels = [product.label for product in products(ALL_SHAPES[shapes[0]], Quantization.NONE, 1)]
    print(f"{'':24s}" + "".join(f"{label:>15s}" for label in labels) + f"{'step ms':>10s}")
    for shape in shapes:
        for batch in BATCHES:
            for packing in packings:
                if time.perf_counter() - begin_s > limit_s:
                    print("the time limit is reached")
                    return
                cells, total_us = [], 0.0
                for product in products(ALL_SHAPES[shape], packing, batch):
                    time_us, num_bytes = time_product(product)
                    total_us += product.count * time_us
                    cells.append(f"{time_us:.1f} ({num_bytes / time_us * 1e6 / bandwidth:.0%})")
                name = f"{shape} batch {batch} {packing.value}"
                print(f"{name:24s}" + "".join(f"{cell:>15s}" for cell in cells) + f"{total_us / 1e3:10.3f}", flush=True)
