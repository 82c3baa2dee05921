"""What a step is tuned over: its sizes, ways to cut attention, and configurations of its projections."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks.kernel_tuning import CONTEXT, DEVICE, DTYPE, PAGE_SIZE, Shape
from graphrunner.kernels.triton import linear_config, runtime
from graphrunner.kernels.triton.attention_common import DecodeMetadata
from graphrunner.kernels.triton.decode_attention_config import (
    DecodeAttentionConfig,
    attention_key,
    num_splits_for,
)
from graphrunner.kernels.triton.linear_candidates import LinearProblem, candidate_configs
from graphrunner.kernels.triton.linear_config import (
    MAX_FUSED_ROWS,
    MAX_SKINNY_ROWS,
    LinearConfig,
    LinearKind,
    LinearShape,
    is_valid,
)
from graphrunner.kernels.triton.linear_tuning import time_config, weight_copies
from graphrunner.kernels.triton.skinny_linear import row_block

if TYPE_CHECKING:
    from benchmarks.kernel_steps import Model

NUM_OF_KIND = 3
"""Configurations of each kind that are tried in a step where several kinds can be the fastest."""
FIELDS: dict[LinearKind, dict[str, tuple[int, ...]]] = {
    LinearKind.VECTOR: {
        "programs_per_multiprocessor": (1, 2, 3, 4), "num_stages": (2, 3, 4, 5), "block_n": (1, 2, 4, 8),
        "block_k": (512, 1024, 2048), "num_warps": (4, 8), "trigger": (0, 1),
    },
    LinearKind.MMA: {
        "block_n": (16, 32), "block_k": (64, 128, 256), "slices": (4, 8), "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4), "trigger": (0, 1),
    },
    LinearKind.SKINNY: {
        "block_n": (64, 128), "block_k": (64, 128), "slices": (1, 2, 4), "num_warps": (4, 8),
        "num_stages": (3, 4, 5, 6, 8), "ahead_bytes": (0, 256, 512, 1024, 2048), "block_b": (64, 128, 256),
        "fuses_norm": (False, True),
    },
}  # fmt: skip
ATTENTION_TILES = ((32, 2, 2), (32, 4, 2), (64, 2, 2), (64, 4, 2), (128, 4, 2))
"""Tokens, warps, stages."""
ATTENTION_PROGRAMS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Step:
    """So many requests, each with `width` tokens."""

    num_requests: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Step":
        """From "16" or "1x5". Errors: ValueError for more rows than a table has."""
        num_requests, _, width = text.partition("x")
        step = cls(int(num_requests), int(width or 1))
        if step.num_rows > MAX_SKINNY_ROWS:
            raise ValueError(f"{text} has more than {MAX_SKINNY_ROWS} rows, which the library multiplies")
        return step

    @property
    def num_rows(self) -> int:
        """Rows of its projections."""
        return self.num_requests * self.width

    @property
    def has_kinds(self) -> bool:
        """Whether it has so many rows that several kinds of kernel may be the fastest."""
        return self.num_rows > 1

    @property
    def is_large(self) -> bool:
        """Whether it has more rows than the fused kernels take."""
        return self.num_rows > MAX_FUSED_ROWS

    def metadata(self, model: "Model") -> DecodeMetadata:
        """Its last tokens stand at the end of CONTEXT."""
        rows = torch.arange(1, self.num_requests + 1, dtype=torch.int32, device=DEVICE)
        position = torch.arange(CONTEXT - self.width, CONTEXT, device=DEVICE)
        pages = model.page_table[rows.long()][:, position // PAGE_SIZE].long()
        slots = pages * PAGE_SIZE + position % PAGE_SIZE
        seq_lens = torch.full((self.num_requests,), CONTEXT, dtype=torch.int32, device=DEVICE)
        return DecodeMetadata(position.repeat(self.num_requests), slots.flatten(), seq_lens, rows, model.page_table)

    def linear_key(self, linear: LinearShape) -> str:
        """A projection's entry in the table."""
        return linear_config.config_key(DEVICE, DTYPE, linear, self.num_rows)

    def linear_config(self, linear: LinearShape) -> LinearConfig:
        """What a projection runs now."""
        return linear_config.select_config(linear, self.num_rows, DTYPE, DEVICE)

    def attention_key(self, shape: Shape) -> str:
        """Attention's entry in the table."""
        return attention_key(self.num_requests, shape.kv_heads, shape.head_dim, DEVICE, DTYPE, self.width)


def neighbours(linear: LinearShape, step: Step) -> Iterator[LinearConfig]:
    """Configurations that differ in one field from what is in use."""
    config = step.linear_config(linear)
    for name, values in FIELDS.get(config.kind, {}).items():
        for value in values:
            other = replace(config, **{name: value})
            is_same = name == "block_b" and row_block(other, step.num_rows) == row_block(config, step.num_rows)
            if other != config and not is_same and is_valid(other, linear, step.num_rows, DTYPE):
                yield other


def cuts(shape: Shape, step: Step) -> dict[DecodeAttentionConfig, tuple[int, int, int, int, int]]:
    """Ways to cut attention, each with the row of the table that yields it."""
    found = {}
    for programs in ATTENTION_PROGRAMS:
        num_programs = programs * runtime.num_multiprocessors(DEVICE)
        splits = num_splits_for(num_programs, step.num_requests * shape.kv_heads)
        for block_n, warps, stages in ATTENTION_TILES:
            config = DecodeAttentionConfig(splits, block_n, warps, stages)
            found.setdefault(config, (programs, block_n, warps, stages, 0))
    return found


def contenders(linear: LinearShape, step: Step) -> list[LinearConfig]:
    """Everything that may be fast at so many rows by itself."""
    return candidate_configs(LinearProblem(linear, step.num_rows, DTYPE))


def fastest(linear: LinearShape, step: Step) -> list[LinearConfig]:
    """The contenders of each kind that are, without what is in use; prints what the best of each kind took."""
    problem = LinearProblem(linear, step.num_rows, DTYPE)
    weights = weight_copies(linear, DTYPE, DEVICE)
    times_us = {}
    for config in contenders(linear, step):
        try:
            times_us[config] = time_config(problem, config, weights).time_us
        except Exception:  # more shared memory than there is
            torch.cuda.synchronize()
    ranked = sorted(times_us, key=lambda config: times_us[config])
    kinds = list(dict.fromkeys(config.kind for config in ranked))
    chosen = {kind: [config for config in ranked if config.kind is kind][:NUM_OF_KIND] for kind in kinds}
    name = f"{linear.mode.name.lower()} {linear.num_outputs}x{linear.num_inputs}"
    print(f"   {name} alone: {', '.join(f'{kind.value} {times_us[chosen[kind][0]]:.1f}' for kind in kinds)}")
    return [config for kind in kinds for config in chosen[kind] if config != step.linear_config(linear)]
