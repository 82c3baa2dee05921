"""Asking L2 for weights that a later moment needs, while nothing else keeps the memory busy.

A kernel of a chain begins before its predecessor ends (see linear_kernels, Note [weights before wait]), and what it
asks for then comes while that one computes. Nothing waits for these loads; what is asked for in vain costs bandwidth.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

PIECE_BYTES = 1024
_PIECE = tl.constexpr(PIECE_BYTES)


@triton.jit
def ask_l2(ptr, NUM_BYTES: tl.constexpr):
    """Ask for NUM_BYTES from each pointer on; NUM_BYTES is a string, a multiple of 16."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], " + NUM_BYTES + "; mov.u32 $0, 0; }",
        "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_pieces(ptr, first_byte, num_pieces, program, num_programs, LANES: tl.constexpr):
    """Ask for `num_pieces` of PIECE_BYTES from `first_byte` on, dealt out to the threads of all programs."""
    address = ptr.to(tl.int64) + first_byte
    for first in tl.range(0, num_pieces, num_programs * LANES):
        piece = first + program * LANES + tl.arange(0, LANES)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0; }",
            "=r,l,r", [address + piece.to(tl.int64) * _PIECE, (piece < num_pieces).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
