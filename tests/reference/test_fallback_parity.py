"""Architectures without a file of their own, through transformers' code and our pages."""

import json

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import NUM_TOKENS, OTHERS, TinyModel, save_tiny_model

from graphrunner.attention.backend import GraphSupport
from graphrunner.attention.cpu_attention import CpuAttention
from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ConfigError, ModelLoadError
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import ModelImpl, load_model
from graphrunner.models.transformers_fallback import TransformersCausalLM
from graphrunner.weights.source import LoadFormat, load_model_config, resolve_source

DENSE = ModelOptions()


def load(folder, options=DENSE, impl=ModelImpl.AUTO, load_format=LoadFormat.AUTO):
    source = resolve_source(str(folder), load_format)
    return load_model(source, load_model_config(source), options, impl=impl)


@pytest.mark.parametrize("name", [*OTHERS, "gemma2", "mistral"])
def test_flat_chunked_and_decoded(name, reference):
    folder, prompts, expected_tokens, expected_logits = reference(name)
    model = load(folder, impl=ModelImpl.TRANSFORMERS)
    assert isinstance(model, TransformersCausalLM)
    driver = PagedDriver(model, CpuAttention())
    tokens, logits = driver.greedy(prompts, NUM_TOKENS)
    for key in prompts:
        torch.testing.assert_close(logits[key], expected_logits[key], rtol=1e-3, atol=2e-3)
    assert tokens == expected_tokens

    chunked = PagedDriver(model, TorchAttention())
    chunked.new("b")
    chunked.step({"b": prompts["b"][:6]})
    logits = chunked.step({"b": prompts["b"][6:]}, num_padding_tokens=2, num_padding_reqs=1)
    torch.testing.assert_close(logits[0], expected_logits["b"][0], rtol=1e-3, atol=2e-3)


def test_experts_and_host_side_rope_stay_out_of_graphs(reference):
    assert load(reference("mixtral")[0]).graph_support is GraphSupport.NEVER
    assert load(reference("olmo2")[0]).graph_support is GraphSupport.ALWAYS
    assert load(reference("llama-dynamic")[0], impl=ModelImpl.TRANSFORMERS).graph_support is GraphSupport.NEVER


def test_random_weights_need_no_checkpoint(reference, tmp_path):
    config_text = (reference("olmo2")[0] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config_text)
    model = load(tmp_path, load_format=LoadFormat.DUMMY)
    driver = PagedDriver(model, TorchAttention())
    driver.new("a")
    assert driver.step({"a": [5, 6, 7]}).isfinite().all()


def test_refusals_name_the_setting(reference):
    folder = reference("olmo2")[0]
    with pytest.raises(ConfigError, match="quantization='int8': needs an architecture with a native model"):
        load(folder, ModelOptions(quantization=Quantization.INT8))
    with pytest.raises(ConfigError, match="model_impl='native': Olmo2ForCausalLM has no native model"):
        load(folder, impl=ModelImpl.NATIVE)


def test_recurrent_layers_are_refused(tmp_path):
    save_tiny_model(TinyModel("mamba", {"state_size": 4}), tmp_path)
    with pytest.raises(ModelLoadError, match="MambaForCausalLM: 0 paged attention calls for 2 layers"):
        load(tmp_path)


def test_broken_folder_is_one_line(reference, tmp_path):
    config = json.loads((reference("olmo2")[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
