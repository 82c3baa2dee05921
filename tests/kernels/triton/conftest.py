"""Kernels run in Triton's interpreter where there is no GPU; the choice must be made before triton is imported."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor, scope) -> None:
    """The interpreter's scalars are arrays of one element, which newer numpy no longer converts to int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_with_index

_create_dot = interpreter.InterpreterBuilder.create_dot


def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """The interpreter keeps bfloat16 as raw 16-bit integers and would multiply those."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _create_wide_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Float32 products are summed in float64: numpy's own sums depend on the number of rows on some processors, where a
    card's do not."""
    a, b = _widened(a), _widened(b)
    if a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)
    return _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)


interpreter.InterpreterBuilder.create_dot = _create_wide_dot


_cast = interpreter.InterpreterBuilder.cast_impl


def _cast_through_float32(self, src, dst_type):
    """The interpreter would keep an integer's value as the bits of a bfloat16."""
    if dst_type.scalar == tl.bfloat16 and src.dtype.scalar.is_int():
        src = _cast(self, src, tl.float32)
    return _cast(self, src, dst_type)


interpreter.InterpreterBuilder.create_si_to_fp = _cast_through_float32
interpreter.InterpreterBuilder.create_ui_to_fp = _cast_through_float32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU these tests run on it, so they are among its tests."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.cuda)


@pytest.fixture
def device() -> torch.device:
    """Where these tests run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
