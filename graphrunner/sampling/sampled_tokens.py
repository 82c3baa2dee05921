"""Sampled tokens and their logprobs on the way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from graphrunner.sampling.readback import TokenCopy

Entry = TypeVar("Entry")


class HostCopy:
    """Device tensors being copied to the host together.

    Aliasing: on the CPU the tensors are cloned, so the source may be overwritten at once.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [_start_copy(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tensors = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host. Sync: waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors


def _start_copy(source: torch.Tensor) -> torch.Tensor:
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return host.copy_(source, non_blocking=True)


class LazyEntries(Sequence[Entry | None], Generic[Entry]):
    """A sequence whose entries are made at the first read. Sync: that read waits for the step."""

    def __init__(self, length: int, make: Callable[[], Sequence[Entry | None]]) -> None:
        self._length = length
        self._make = make
        self._entries: Sequence[Entry | None] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if self._entries is None:
            self._entries = self._make()
        return self._entries[index]


class SampledTokens:
    """A `TokenHandle`: one token for each request of a batch whose `samples` is True, in batch order.

    Args:
        copy: of `token_ids`, under way.
        picked: places in `token_ids` of the requests that sample; None is all.

    Attributes:
        token_ids: int32 [num_sampled], device; on the in-graph path int32 [num_reqs], unsampled requests included, and
            in graph memory until the runner's next `execute`.
        logprobs: per request of the batch; empty when nobody asked.
        prompt_logprobs: per request (first position, entries); empty when nobody asked.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        copy: TokenCopy,
        picked: Sequence[int] | None = None,
        logprobs: Sequence = (),
        prompt_logprobs: Sequence = (),
    ) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self._picked = picked
        self._copy = copy
        self._host: list[int] | None = None

    def wait(self) -> list[int]:
        """One id a sampled request, in batch order. Sync: waits for the step."""
        if self._host is None:
            ids = self._copy.read()
            self._host = ids if self._picked is None else [ids[index] for index in self._picked]
        return self._host


class VerifiedTokens:
    """A `BlockHandle`: what a VERIFY step yields for each request of its batch.

    Args:
        copy: of `token_ids`, under way.
        make_logprobs: from the tokens of each request; None when nobody asked.

    Attributes:
        token_ids: int32 [num_reqs, W], device; -1 after the last token. May be in graph memory until the runner's next
            `execute`.
        num_new: int32 [num_reqs], device; how many tokens that are.
        logprobs: per request, one entry a token; empty when nobody asked.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        num_new: torch.Tensor,
        copy: TokenCopy,
        make_logprobs: Callable[[list[list[int]]], Sequence] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.num_new = num_new
        self._copy = copy
        self._host: list[list[int]] | None = None
        self.logprobs: Sequence = ()
        if make_logprobs is not None:
            self.logprobs = LazyEntries(token_ids.shape[0], lambda: make_logprobs(self.wait_blocks()))

    def wait_blocks(self) -> list[list[int]]:
        """The tokens of each request, at least one. Sync: waits for the step."""
        if self._host is None:
            self._host = [[token_id for token_id in row if token_id >= 0] for row in self._copy.read()]
        return self._host
