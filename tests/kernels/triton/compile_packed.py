"""Compile the packed kernels for real cards on a machine without one; prints a line a kernel. For the test beside it.

usage: python compile_packed.py CAPABILITY
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from graphrunner.config.quantization import Quantization
from graphrunner.kernels.packed_weight import Weight
from graphrunner.kernels.triton import quantized_linear, runtime
from graphrunner.kernels.triton.linear_config import LinearMode
from graphrunner.kernels.triton.quantized_config import PackedKind, select_packed_config
from graphrunner.kernels.triton.runtime import Launch
from graphrunner.weights.quantize import quantize

POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
NUM_OUTPUTS, WIDTH = 256, 1536


def compile_launch(launch: Launch, capability: int) -> None:
    """To machine code, as the launch would be specialised."""
    signature, constants, attributes = {}, {}, {}
    operands = iter(launch.operands)
    for index, name in enumerate(launch.kernel.arg_names):
        if name in launch.settings:
            signature[name], constants[(index,)] = "constexpr", launch.settings[name]
            continue
        value = next(operands)
        if isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {name: value for name, value in launch.settings.items() if name in OPTIONS}
    compiled = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(compiled.asm["cubin"]) > 1000


def launches(weight: Weight, mode: LinearMode, num_rows: int) -> list[Launch]:
    """What a product of this shape launches."""
    x = torch.empty(num_rows, WIDTH, dtype=torch.bfloat16)
    out = torch.empty(num_rows, NUM_OUTPUTS, dtype=torch.bfloat16)
    is_gated = mode is LinearMode.GATED
    config = select_packed_config(weight, num_rows, x.dtype, is_gated)
    is_tiled = config.kind is PackedKind.TILE
    norm = torch.empty(WIDTH) if is_gated and not is_tiled else None
    call = quantized_linear.PackedCall(mode, x, norm, 1e-6, weight, None, out, out)
    return quantized_linear.prepare(call, config, x.device)


def main(capability: int) -> None:
    runtime.use_dependent_launch = lambda device: capability >= 90
    runtime.has_fp8 = lambda device: capability >= 89
    for packing in (one for one in Quantization if one is not Quantization.NONE):
        for mode, num_rows in ((LinearMode.GATED, 1), (LinearMode.GATED, 8), (LinearMode.RESIDUAL, 40)):
            num_weight_rows = NUM_OUTPUTS * (2 if mode is LinearMode.GATED else 1)
            weight = quantize(torch.ones(num_weight_rows, WIDTH), packing)
            for launch in launches(weight, mode, num_rows):
                compile_launch(launch, capability)
                print(packing.value, mode.name, num_rows, launch.kernel.__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
