"""Deterministic mode through the GPU's own kernels, a whole model: a sequence's logits in any company and any chunks.

Without a GPU the kernels run in Triton's interpreter. It rounds the two loops of the flash pass alike, which a compiler
does not: there the one with masks is made to round otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from paged_driver import PagedDriver
from tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model

from graphrunner.attention.triton_attention import TritonAttention
from graphrunner.kernels.batch_invariance import batch_invariant
from graphrunner.kernels.triton import gpu_ops, invariant_linear, prefill_attention
from graphrunner.kernels.triton.attention_common import masked_scores
from graphrunner.layers import ops
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import build_model
from graphrunner.weights.checkpoint import iterate_weights
from graphrunner.weights.source import load_model_config, resolve_source

LENGTH = 40  # past one tile of keys
CUTS = [30, 5, 4, 1]  # tokens 32 to 34 are in a tile of queries that begins before them


@triton.jit
def _rounded_otherwise(scores, is_visible, scale_log2, soft_cap, HAS_CAP: tl.constexpr):
    return masked_scores(scores * 1.0001, is_visible, scale_log2, soft_cap, HAS_CAP)


@pytest.fixture
def gpu_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ops` chooses for tensors of a GPU, for those of the host too."""
    if device.type == "cuda":
        return
    monkeypatch.setattr(ops, "_invariant_kernels", lambda x: invariant_linear)
    for name, kernel in (("norm", gpu_ops.rms_norm), ("norm_residual", _norm_residual)):
        monkeypatch.setattr(ops, name, kernel)
    monkeypatch.setattr(ops, "embedding", lambda ids, table, scale, dtype: gpu_ops.embedding(ids, table, scale))
    monkeypatch.setattr(prefill_attention, "masked_scores", _rounded_otherwise)


def _norm_residual(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    return gpu_ops.rms_norm(x, weight, eps).add_(residual)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def make_driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], PagedDriver]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(NATIVE[request.param], folder)
    source = resolve_source(str(folder))
    config = load_model_config(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, ModelOptions(num_positions=128, device=device))
    model.load_weights(iterate_weights(source, config, dtype=torch.float32))
    return lambda is_invariant: PagedDriver(model, TritonAttention(is_invariant))


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def logits_of(driver: PagedDriver, pieces: list[int], company: list[int]) -> torch.Tensor:
    """All logits of the sequence, cut into pieces; with company the others' tokens stand before its own."""
    tokens, done, found = tokens_of(1, LENGTH), 0, []
    driver.new("target")
    if company:
        driver.new("other")
    for index, length in enumerate(pieces):
        chunks = {"other": tokens_of(2, company[index])} if index < len(company) else {}
        logits = driver.step(
            chunks | {"target": tokens[done : done + length]}, num_padding_tokens=1, num_padding_reqs=1, all_rows=True
        )
        found.append(logits[-length:])
        done += length
    assert done == LENGTH
    return torch.cat(found)


@pytest.mark.usefixtures("gpu_kernels")
def test_logits_do_not_depend_on_chunks_and_company(make_driver: Callable[[bool], PagedDriver]) -> None:
    with batch_invariant(True):
        alone = logits_of(make_driver(True), [LENGTH], [])
        cut = logits_of(make_driver(True), CUTS, [3, 1])
    for place in range(LENGTH):
        assert torch.equal(cut[place], alone[place]), f"token {place}"
