"""Packed weights: how far rounding may go, what stacking keeps, and agreement with torchao's numbers."""

import pytest
import torch

from graphrunner.config.quantization import Quantization
from graphrunner.kernels.packed_weight import Weight, WeightLayout, dense_weight, dequantize, pack_int4, unpack_int4
from graphrunner.weights import quantize as quantizing
from graphrunner.weights.quantize import for_cpu, quantize, quantize_int4, stack

PACKINGS = [one for one in Quantization if one is not Quantization.NONE]
# Largest error as a share of the largest weight of the row: half a step of each number format.
LARGEST_ERROR = {
    Quantization.INT8: 0.5 / 127,
    Quantization.INT4: 1.02 / 15,
    Quantization.FP8: 2.0**-4,
    Quantization.FP8_BLOCK: 2.0**-4,
}


def matrix(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shape", [(1, 128), (130, 256), (256, 96), (257, 160)])
def test_rounding_is_bounded_and_shapes_stay(packing, shape):
    dense = matrix(*shape)
    dense[0] = 0.0
    weight = quantize(dense, packing)
    assert weight.shape == shape and not weight.is_dense
    restored = dequantize(weight)
    assert restored.dtype is torch.float32 and (restored[0] == 0).all()
    largest = dense.abs().amax(1, keepdim=True)
    assert ((restored - dense).abs() <= LARGEST_ERROR[packing] * 1.001 * largest + 1e-9).all()
    if packing is not Quantization.FP8_BLOCK or shape[0] > 1:
        assert weight.num_bytes < dense.nbytes * (0.18 if packing is Quantization.INT4 else 0.30)


@pytest.mark.parametrize("packing", [Quantization.INT8, Quantization.FP8, Quantization.FP8_BLOCK])
def test_a_packed_weight_packs_into_itself(packing):
    once = dequantize(quantize(matrix(256, 128), packing))
    torch.testing.assert_close(dequantize(quantize(once, packing)), once, atol=1e-6, rtol=0)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_tall_matrix_is_packed_in_slabs(packing, monkeypatch):
    dense = matrix(640, 128)
    whole = quantize(dense, packing)
    monkeypatch.setattr(quantizing, "_ROWS_AT_ONCE", 256)
    slabs = quantize(dense, packing)
    assert slabs.row_block == whole.row_block
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(slabs.tensors, whole.tensors, strict=True))


def test_int4_halves_of_a_group_share_a_byte():
    numbers = (torch.arange(64) % 16).to(torch.uint8).repeat(3, 1)
    data = pack_int4(numbers, 32)
    assert data.shape == (3, 32) and data[0, 1] == numbers[0, 1] | numbers[0, 17] << 4
    assert torch.equal(unpack_int4(data, 32), numbers)


def test_int4_is_what_torchao_chooses():
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    dense = matrix(33, 256)
    mine = quantize_int4(dense, 64)
    how = {"quant_min": 0, "quant_max": 15}
    scale, zero = primitives.choose_qparams_affine(
        dense, primitives.MappingType.ASYMMETRIC, (1, 64), torch.uint8, scale_dtype=torch.bfloat16, **how
    )
    scale, zero = scale.reshape(33, 4), zero.reshape(33, 4)
    assert torch.equal(mine.scale, scale)
    assert (mine.zero.int() - zero.int()).abs().max() <= 1  # theirs rounds before the scale becomes bfloat16
    theirs = primitives.quantize_affine(dense, (1, 64), mine.scale.float(), mine.zero.int(), torch.uint8, **how)
    assert torch.equal(unpack_int4(mine.data, 64), theirs)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("rows", [(128, 256), (256, 40), (40, 24)])
def test_stacking_is_concatenation(packing, rows):
    parts = [quantize(matrix(count, 128, seed=count), packing) for count in rows]
    whole = stack(parts)
    assert whole.layout is parts[0].layout
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))
    if packing is Quantization.FP8_BLOCK:
        assert whole.row_block == (1 if rows == (40, 24) else 128)


def test_parts_of_different_packing_become_dense():
    parts = [quantize(matrix(8, 64), Quantization.FP8), dense_weight(matrix(4, 64, seed=1).bfloat16())]
    whole = stack(parts)
    assert whole.is_dense
    torch.testing.assert_close(whole.data, torch.cat([dequantize(parts[0]), parts[1].data.float()]))


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_cpu_form_has_the_same_numbers(packing):
    weight = quantize(matrix(130, 192), packing)
    on_cpu = for_cpu(weight, torch.float32)
    assert on_cpu.layout in (WeightLayout.INT8, WeightLayout.DENSE)
    torch.testing.assert_close(dequantize(on_cpu), dequantize(weight), atol=1e-6, rtol=0)


def test_a_weight_must_be_whole():
    with pytest.raises(AssertionError, match="a scale belongs to packed weights"):
        Weight(WeightLayout.INT8, torch.zeros(2, 4, dtype=torch.int8))
    with pytest.raises(AssertionError, match="a zero belongs to INT4"):
        Weight(WeightLayout.INT4, torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), group_size=8)
