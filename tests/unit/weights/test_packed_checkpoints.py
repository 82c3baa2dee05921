"""Checkpoints of packed projections in their public layouts, and the one line for those that cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packed_writing import LAYOUTS, Layout, fp8_block, fp8_tensor, int4_group, write_folder, write_packed
from safetensors.torch import save_file

from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ConfigError, ModelLoadError
from graphrunner.kernels.packed_weight import Weight, WeightLayout, dequantize
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import ModelImpl, load_model
from graphrunner.weights.checkpoint import iterate_weights
from graphrunner.weights.source import LoadFormat, load_model_config, resolve_source


def read(folder: Path, load_format: LoadFormat = LoadFormat.AUTO) -> dict[str, torch.Tensor | Weight]:
    source = resolve_source(str(folder), load_format)
    return dict(iterate_weights(source, load_model_config(source), dtype=torch.float32))


def load(folder: Path, **options):
    source = resolve_source(str(folder))
    return load_model(source, load_model_config(source), ModelOptions(num_positions=64, **options))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_it_is_meant(tmp_path, layout):
    meaning = write_packed(tmp_path, LAYOUTS[layout])
    found = read(tmp_path)
    assert set(found) == set(meaning)
    num_packed = 0
    for name, weight in found.items():
        if isinstance(weight, Weight):
            num_packed += 1
            assert not weight.is_dense
        numbers = dequantize(weight) if isinstance(weight, Weight) else weight
        torch.testing.assert_close(numbers, meaning[name], atol=1e-6, rtol=1e-6)
    assert num_packed in (13, 14)  # one projection may be on the list of those left alone


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_model_multiplies_by_those_numbers(tmp_path, layout):
    meaning = write_packed(tmp_path, LAYOUTS[layout])
    model = load(tmp_path)
    block = model.layers[0]
    expected = torch.cat([meaning[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    torch.testing.assert_close(dequantize(block.qkv_proj.packed), expected, atol=1e-6, rtol=1e-6)
    x = torch.randn(3, 160)
    residual = torch.randn(3, 64)
    for index, layer in enumerate(model.layers):
        down = meaning[f"model.layers.{index}.mlp.down_proj.weight"]
        torch.testing.assert_close(layer.down_proj(x, residual.clone()), residual + x @ down.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["fp8-block", "ct-int4", "ct-fp8-channel", "ct-int8", "awq"])
def test_random_weights_come_in_the_layout_of_the_config(tmp_path, layout):
    (tmp_path / "real").mkdir()
    write_packed(tmp_path / "real", LAYOUTS[layout])
    (tmp_path / "config.json").write_text((tmp_path / "real" / "config.json").read_text())
    real, dummy = read(tmp_path / "real"), read(tmp_path, LoadFormat.DUMMY)
    assert set(real) == set(dummy)
    for name, weight in real.items():
        assert isinstance(weight, Weight) == isinstance(dummy[name], Weight), name
        if isinstance(weight, Weight):
            assert weight.is_like(dummy[name]) and weight.scale.shape == dummy[name].scale.shape, name


def test_scales_of_the_cache_reach_the_attention(tmp_path):
    meaning = write_packed(tmp_path, LAYOUTS["ct-fp8-tensor"])
    extra = {
        "model.layers.1.self_attn.k_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.v_scale": torch.tensor(2.0),
    }
    save_file(extra, tmp_path / "extra.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read(tmp_path)) == set(meaning) | set(extra)
    specs = [layer.attention.spec for layer in load(tmp_path).layers]
    assert [(spec.k_scale, spec.v_scale) for spec in specs] == [(1.0, 1.0), (0.25, 2.0)]
    assert specs[1].cache_scales(torch.zeros(1)) == (1.0, 1.0)
    assert specs[1].cache_scales(torch.zeros(1).to(torch.float8_e4m3fn)) == (0.25, 2.0)


def test_merged_blocks_stay_blocks_where_parts_are_whole_blocks(tmp_path):
    """q has 128 rows, k and v 64: the stacked weight gets a scale per row and block of inputs."""
    write_packed(tmp_path, LAYOUTS["fp8-block"])
    weights = read(tmp_path)
    q = weights["model.layers.0.self_attn.q_proj.weight"]
    assert q.layout is WeightLayout.FP8 and q.row_block == 128 and q.group_size == 128 and q.scale.shape == (1, 1)


@pytest.mark.parametrize(
    ("asked", "is_fine"),
    [(Quantization.FP8, True), (Quantization.FP8_BLOCK, True), (Quantization.INT4, False), (Quantization.INT8, False)],
)
def test_a_setting_must_agree_with_the_checkpoint(tmp_path, asked, is_fine):
    write_packed(tmp_path, LAYOUTS["fp8-block"])
    if is_fine:
        assert load(tmp_path, quantization=asked).head.packed.is_dense
        return
    with pytest.raises(ConfigError, match=f"quantization='{asked.value}': the checkpoint is packed as fp8_block"):
        load(tmp_path, quantization=asked)


def test_the_fallback_does_not_read_packed_weights(tmp_path):
    write_packed(tmp_path, LAYOUTS["fp8-block"])
    source = resolve_source(str(tmp_path))
    with pytest.raises(ConfigError, match="model_impl='transformers': packed weights"):
        load_model(source, load_model_config(source), ModelOptions(), impl=ModelImpl.TRANSFORMERS)


def broken(folder: Path, layout: Layout, **changes: torch.Tensor | None) -> str:
    """Write a layout, then replace or remove parts of one projection; the message."""

    def write(weight: torch.Tensor):
        tensors, meaning = layout.write(weight)
        if weight.shape == (64, 160):
            tensors |= {name: value for name, value in changes.items() if value is not None}
            tensors = {name: value for name, value in tensors.items() if changes.get(name, value) is not None}
        return tensors, meaning

    write_packed(folder, replace(layout, write=write))
    return refusal(folder)


def test_wrong_scales_are_named_with_both_shapes(tmp_path):
    block = Layout(LAYOUTS["fp8-block"].section | {"modules_to_not_convert": ["lm_head"]}, fp8_block)
    said = broken(tmp_path, block, weight_scale_inv=torch.ones(2, 2))
    assert "down_proj.weight_scale_inv has shape [2, 2], expected [1, 2]" in said
    said = broken(tmp_path, block, weight_scale_inv=None)
    assert "down_proj.weight_scale is missing: the weight is F8_E4M3" in said
    said = broken(tmp_path, LAYOUTS["fp8-tensor"], weight_scale=torch.ones(3))
    assert "down_proj.weight_scale has shape [3], expected [] or [1] or [64] or [64, 1]" in said
    said = broken(tmp_path, LAYOUTS["ct-int4"], weight_scale=torch.ones(64, 4))
    assert "weight_scale has shape [64, 4], expected [64, 5]" in said


def test_other_numbers_than_the_config_says(tmp_path):
    said = broken(tmp_path, LAYOUTS["fp8-tensor"], weight=torch.zeros(64, 160))
    assert "down_proj.weight is missing or not F8_E4M3, but has a scale" in said
    said = broken(tmp_path, LAYOUTS["fp8-tensor"], weight=torch.zeros(64, 159).to(torch.float8_e4m3fn))
    assert "down_proj.weight has shape [64, 159], the config says [64, 160]" in said
    said = broken(tmp_path, LAYOUTS["ct-int4"], weight_g_idx=torch.zeros(160, dtype=torch.int32))
    assert "weight_g_idx: weights in another order" in said


def test_gptq_inputs_in_another_order(tmp_path):
    said = broken(tmp_path, LAYOUTS["gptq"], g_idx=torch.arange(160, dtype=torch.int32).flip(0) // 32)
    assert "down_proj.g_idx: weights in another order than their inputs" in said
    said = broken(tmp_path, LAYOUTS["awq"], scales=torch.ones(4, 64))
    assert "down_proj.scales has shape [4, 64], expected [5, 64]" in said


def test_a_group_that_does_not_divide_is_named(tmp_path):
    section = json.loads(json.dumps(LAYOUTS["ct-int4"].section))
    section["config_groups"]["group_0"]["weights"]["group_size"] = 48
    write_packed(tmp_path, LAYOUTS["ct-int4"])
    text = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert "weights.group_size=48 does not divide a projection of" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "hqq"}, "quant_method='hqq' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits=3 must be 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 7}, "group_size=7 must be -1 or an even number"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version='gemv' must be gemm"),
        ({"fmt": "e5m2"}, "quantization_config.fmt='e5m2' must be e4m3"),
        ({"weight_block_size": [128]}, "quantization_config.weight_block_size=[128] must be two positive numbers"),
        ({"weight_block_size": [0, 128]}, "weight_block_size=[0, 128] must be"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' must be a list"),
    ],
)
def test_sections_that_cannot_be(tmp_path, changes, said):
    write_folder(tmp_path, LAYOUTS["fp8-block"].section | changes, {"a": torch.zeros(1)}, 1)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    ("weights", "fmt", "said"),
    [
        ({"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized", "format='nvfp4-pack-quantized' is not supported"),
        ({"num_bits": 3, "type": "int"}, "pack-quantized", "is not supported with 3-bit int weights"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor_group"}, "float-quantized", "strategy='tensor_group'"),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 7}, "pack-quantized", "group_size=7"),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"},
            "pack-quantized",
            "actorder='group' is not supported",
        ),
    ],
)
def test_compressed_sections_that_cannot_be(tmp_path, weights, fmt, said):
    group = {"targets": ["Linear"], "weights": weights}
    section = {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"g": group}}
    write_folder(tmp_path, section, {"a": torch.zeros(1)}, 1)
    assert said in refusal(tmp_path)


def test_packed_weights_of_a_foreign_architecture(tmp_path):
    write_folder(tmp_path, LAYOUTS["fp8-block"].section, {"a": torch.zeros(1)}, 1)
    text = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["GPTNeoXForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text | {"model_type": "gpt_neox"}))
    assert "quant_method='fp8' of GPTNeoXForCausalLM, which has no native model" in refusal(tmp_path)


def test_the_tests_own_writers_round_little():
    weight = torch.randn(64, 160, generator=torch.Generator().manual_seed(1))
    for write in (fp8_block, fp8_tensor, int4_group, lambda one: int4_group(one, False)):
        assert (write(weight)[1] - weight).abs().max() < 0.35
