"""Asking L2 for what a kernel reads after its wait for the kernel before it."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def ask_l2(row_ptr, NUM_BYTES: tl.constexpr):
    """Ask for the first NUM_BYTES of each row to be brought to L2; nothing waits for it."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], " + NUM_BYTES + "; mov.u32 $0, 0; }",
        "=r,l", [row_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
