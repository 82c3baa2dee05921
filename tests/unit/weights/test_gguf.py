"""GGUF files: block formats equal to the gguf package's, whole models read back, broken files refused in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_writing import tiny_model, write_gguf

from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.config.model_config import RopeScaling
from graphrunner.core.errors import ModelLoadError
from graphrunner.weights.checkpoint import Rounding, iterate_weights
from graphrunner.weights.gguf_header import read_gguf_metadata
from graphrunner.weights.gguf_quants import GGMLType, dequantize
from graphrunner.weights.gguf_reader import GGUFFile
from graphrunner.weights.source import load_model_config, resolve_source

ARCHITECTURES = ["llama", "smollm3", "qwen2", "qwen3", "gemma2", "gemma3"]


@pytest.mark.parametrize("kind", list(GGMLType))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_bytes_decode_as_in_the_gguf_package(kind: GGMLType) -> None:
    raw = np.random.default_rng(int(kind)).integers(0, 256, (300, kind.block_bytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw.copy(), gguf.GGMLQuantizationType(int(kind))).ravel()
    out = torch.empty(300 * kind.block_len)
    dequantize(torch.from_numpy(raw).view(-1), kind, out)
    # Random scales include infinities and NaN; their payload is nobody's concern.
    np.testing.assert_array_equal(out.numpy(), expected)


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.randint(0, 255, (100 * GGMLType.Q8_0.block_bytes,), dtype=torch.uint8)
    whole, pieces = torch.empty(3200), torch.empty(3200)
    dequantize(raw, GGMLType.Q8_0, whole)
    monkeypatch.setattr("graphrunner.weights.gguf_quants._CHUNK_VALUES", 96)
    dequantize(raw, GGMLType.Q8_0, pieces)
    assert torch.equal(whole.nan_to_num(), pieces.nan_to_num())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_written_model_reads_back(architecture: str, tmp_path: Path) -> None:
    hf_config, state = tiny_model(architecture)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture, hf_config, state)
    source = resolve_source(str(path))
    config = load_model_config(source)
    weights = dict(iterate_weights(source, config, dtype=torch.float32))
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    assert set(weights) == set(state) - tied
    is_gemma = architecture.startswith("gemma")
    for name, weight in weights.items():
        # (w + 1) - 1 loses the last bits of a Gemma norm.
        torch.testing.assert_close(weight, state[name], rtol=0, atol=1e-6 if is_gemma and "norm" in name else 0)


def test_a_card_computes_in_bfloat16_what_is_not_stored_in_float32(tmp_path: Path) -> None:
    hf_config, state = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", hf_config, state)
    assert load_model_config(resolve_source(str(tmp_path / "tiny.gguf"))).dtype == "float32"
    packed = resolve_source(None)
    assert load_model_config(packed).dtype == "bfloat16"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_config_of_a_gguf_is_that_of_its_hf_twin(architecture: str, tmp_path: Path) -> None:
    hf_config, state = tiny_model(architecture)
    write_gguf(tmp_path / "tiny.gguf", architecture, hf_config, state)
    found = load_model_config(resolve_source(str(tmp_path / "tiny.gguf")))
    hf = hf_config.to_dict()
    hf["architectures"] = [found.architecture]
    expected = model_config_from_hf(hf)
    for field in ("head_dim", "num_kv_heads", "rope", "layer_types", "qk_norm", "activation", "no_rope_layers"):
        assert getattr(found, field) == getattr(expected, field), field
    for field in ("tie_embeddings", "attn_soft_cap", "final_soft_cap", "attention_bias", "max_position", "norm_eps"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field)), field
    assert found.attention_scale == pytest.approx(expected.attention_scale)


@pytest.mark.parametrize("is_llama3", [True, False])
def test_llama3_scaling_is_recovered_from_its_table(is_llama3: bool, tmp_path: Path) -> None:
    hf_config, state = tiny_model("llama")
    hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    wavelength = 2 * np.pi * 5e5 ** (np.arange(0, 8, 2) / 8)
    smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0, 1)
    table = (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)
    path = tmp_path / "rope.gguf"
    write_gguf(path, "llama", hf_config, state, {"rope_freqs.weight": table if is_llama3 else table[::-1].copy()})
    if is_llama3:
        rope = load_model_config(resolve_source(str(path))).rope
        assert (rope.scaling, rope.factor, rope.original_max_position) == (RopeScaling.LLAMA3, 8.0, 8192)
    else:
        with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight is not a Llama 3 table"):
            load_model_config(resolve_source(str(path)))


def test_rounding_to_bf16_keeps_the_compute_dtype(tmp_path: Path) -> None:
    hf_config, state = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", hf_config, state)
    source = resolve_source(str(tmp_path / "tiny.gguf"))
    config = load_model_config(source)
    for name, weight in iterate_weights(source, config, dtype=torch.float32, rounding=Rounding.BF16):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, state[name].bfloat16().float())


def _tiny_file(tmp_path: Path) -> Path:
    hf_config, state = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", hf_config, state)
    return tmp_path / "tiny.gguf"


def test_every_truncation_is_one_clear_line(tmp_path: Path) -> None:
    data = _tiny_file(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 7, 20, 100, 333, 900, len(data) // 2, len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelLoadError) as caught:
            GGUFFile(cut)
        assert "cut.gguf" in str(caught.value) and "\n" not in str(caught.value)
        assert "unpack" not in str(caught.value)
        if 4 < size < 900:
            assert "cut off inside the header: a value at byte " in str(caught.value) or "a string" in str(caught.value)
            with pytest.raises(ModelLoadError, match=r"cut\.gguf: cut off inside the header"):
                read_gguf_metadata(cut)


def test_damage_in_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    data = bytearray(_tiny_file(tmp_path).read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[int(rng.integers(4, 1500))] ^= int(rng.integers(1, 256))
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            source = resolve_source(str(tmp_path / "bad.gguf"))
            config = load_model_config(source)
            for _name, _weight in iterate_weights(source, config, dtype=torch.float32):
                pass
        except ModelLoadError as error:
            assert "\n" not in str(error)


def test_unknown_architecture_and_type_are_named(tmp_path: Path) -> None:
    path = _tiny_file(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"llamb", 1))
    with pytest.raises(ModelLoadError, match="unknown GGUF architecture 'llamb'"):
        load_model_config(resolve_source(str(path)))
    record = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    path.write_bytes(data[:record] + struct.pack("<I", 10) + data[record + 4 :])
    with pytest.raises(ModelLoadError, match=r"token_embd.weight has the unsupported GGUF type Q2_K"):
        GGUFFile(path)
