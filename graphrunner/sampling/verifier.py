"""Drafts against the target: which stand, and which token comes after them.

A request's tokens are what they would be without drafts. Two rules keep that:

- Drafts without probabilities (n-grams, greedy drafts): the target picks a token at every place, with the noise that
  belongs to the place, as plain decoding would; a draft stands when it is that token. So random requests, too, get the
  very tokens of their seed. A draft stands with the probability the target gives it, as in rejection sampling.
- Drafts that were drawn, with the probabilities they were drawn from: rejection sampling (see `rejection`), which lets
  more of them stand. The tokens follow the target's distribution, and are not those of plain decoding.

Temperature, filters, penalties, biases and held-back stops are applied place by place, as if the drafts before it had
been sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphrunner.core.outputs import ModelOutput, TokenLogprobs
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.device.transfer import to_device
from graphrunner.kernels.noise import gumbel_noise
from graphrunner.kernels.tracing import has_gpu_kernels
from graphrunner.sampling.logprobs import entries_of, score_tokens
from graphrunner.sampling.pick import RowParams, target_probs
from graphrunner.sampling.rejection import accept_greedy, accept_random, acceptance_uniforms
from graphrunner.sampling.sampled_tokens import VerifiedTokens
from graphrunner.sampling.sampler import Sampler


class Verifier:
    """Accepts drafts, inside a recorded forward or after it.

    Args:
        sampler: picks what the target would write.

    Attributes:
        draft_probs: fp32 [num_rows, max_drafts, V], device; what drafts were drawn from, by row of the request table.
            None when they come without. Set before anything is recorded.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.draft_probs: Tensor | None = None
        self._sampler = sampler

    def accept_in_graph(
        self, logits: Tensor, request_rows: Tensor, positions: Tensor, draft_tokens: Tensor, variant: ForwardVariant
    ) -> tuple[Tensor, Tensor]:
        """Accept from device state alone.

        Args:
            logits: float [R * W, V]; request_rows: int32 [R]; positions: int64 [R * W], of the step's tokens.
            draft_tokens: int32 [R, W - 1], -1 where a request has fewer.
            variant: GREEDY or SAMPLE.

        Returns:
            token_ids int32 [R, W], -1 after the last; num_new int32 [R]. In graph: yes. Sync: none.
        """
        width = draft_tokens.shape[1] + 1
        rows = request_rows.repeat_interleave(width, output_size=logits.shape[0])
        if variant is ForwardVariant.SAMPLE and self.draft_probs is not None:
            params = self._sampler.rows.gather(rows, positions + 1)
            return self._accept_drawn(target_probs(logits, params), params, request_rows, draft_tokens)
        # The token picked after a position stands at the next one.
        target_ids = self._sampler.sample_in_graph(logits, rows, (positions + 1).to(torch.int32), variant)
        return accept(draft_tokens, target_ids)

    def verify(self, output: ModelOutput, batch: ScheduledBatch, draft_tokens: Tensor) -> VerifiedTokens:
        """Accept after the forward, for requests that need their logits.

        Args:
            output: of a VERIFY step; when its forward accepted already, only the copy to the host is started.
            draft_tokens: int32 [at least R, W - 1], device; the real requests come first.

        Sync: none, but a row with a grammar waits for its own token of the step before.
        """
        if output.token_ids is not None:
            assert output.num_new is not None, "a forward that accepts says how many"
            return VerifiedTokens(output.token_ids, output.num_new, self._sampler.readback.start(output.token_ids))
        assert output.logits is not None
        draft_tokens = draft_tokens[: batch.num_reqs]
        num_reqs, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
        logits = output.logits.view(num_reqs, width, -1)
        token_ids, num_new = self._accept_shaped(logits, batch, draft_tokens)
        self._recount(batch.rows, draft_tokens, token_ids, num_new)
        asked = [index for index, row in enumerate(batch.rows) if self._sampler.num_logprobs(row) is not None]
        make_logprobs = self._logprobs(batch, asked, logits, token_ids) if asked else None
        tokens = VerifiedTokens(token_ids, num_new, self._sampler.readback.start(token_ids), make_logprobs)
        self._sampler.await_grammars(batch.rows, lambda place: tokens.wait_blocks()[place][0])
        return tokens

    def _accept_shaped(self, logits: Tensor, batch: ScheduledBatch, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Place by place: shape the logits as if the drafts before had been sampled, then pick or weigh."""
        sampler, rows, width = self._sampler, batch.rows, logits.shape[1]
        is_random = sampler.is_random(rows)
        is_drawn = is_random and self.draft_probs is not None
        variant = ForwardVariant.SAMPLE if is_random else ForwardVariant.GREEDY
        staged = to_device(torch.tensor([rows, batch.cached_lens], dtype=torch.int64), logits.device)
        picked, params = [], []
        for place in range(width):
            lengths = [cached_len + 1 + place for cached_len in batch.cached_lens]
            # Requests with a grammar have no drafts: past the first place nothing of them counts.
            shaped = sampler.shaped(logits[:, place].contiguous(), rows, lengths, with_grammars=place == 0)
            positions = staged[1] + 1 + place
            if is_drawn:
                params.append(sampler.rows.gather(staged[0], positions))
                picked.append(target_probs(shaped, params[-1]))
            else:
                picked.append(sampler.sample_in_graph(shaped, staged[0], positions, variant))
            if place < width - 1:
                sampler.count(rows, draft_tokens[:, place])
        joined = torch.stack(picked, dim=1).flatten(0, 1)
        if not is_drawn:
            return accept(draft_tokens, joined)
        columns = [torch.stack([getattr(one, name) for one in params], 1).flatten() for name in RowParams.__slots__]
        return self._accept_drawn(joined, RowParams(*columns), staged[0], draft_tokens)

    def _accept_drawn(
        self, probs: Tensor, params: RowParams, request_rows: Tensor, draft_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rejection sampling; probs: fp32 [R * W, V], params: of each of them."""
        assert self.draft_probs is not None
        num_reqs, num_drafts = draft_tokens.shape
        seeds, positions = params.seeds.view(num_reqs, -1)[:, 0], params.positions.view(num_reqs, -1)
        token_ids = torch.arange(probs.shape[1], device=probs.device)
        kept = accept_random(
            draft_tokens,
            self.draft_probs.index_select(0, request_rows.long())[:, :num_drafts],
            probs.view(num_reqs, num_drafts + 1, -1),
            acceptance_uniforms(seeds, positions[:, :-1]),
            lambda num_accepted: gumbel_noise(seeds, positions[:, 0] + num_accepted, token_ids),
        )
        return kept.token_ids, kept.num_accepted + 1

    def _recount(self, rows: Sequence[int], draft_tokens: Tensor, token_ids: Tensor, num_new: Tensor) -> None:
        """Let penalties forget the drafts that fell, and know the token after those that stand."""
        for place in range(draft_tokens.shape[1]):
            self._sampler.count(rows, draft_tokens[:, place], -(num_new - 1 <= place).to(torch.int32))
        self._sampler.count(rows, token_ids.gather(1, (num_new.long() - 1)[:, None])[:, 0])

    def _logprobs(self, batch, asked, logits, token_ids):  # type: ignore[no-untyped-def]
        """Scores of every place of the requests that asked; cut to the tokens that stand when they are read."""
        num_reqs, width = token_ids.shape
        counts = [self._sampler.num_logprobs(batch.rows[index]) or 0 for index in asked]
        places = to_device(torch.tensor(asked, dtype=torch.int64), logits.device)
        raw, ids = logits.index_select(0, places).flatten(0, 1), token_ids[places].flatten().clamp(min=0)
        copy = score_tokens(raw, ids, max(counts)).start_copy()

        def make(blocks: list[list[int]]) -> list[tuple[TokenLogprobs, ...] | None]:
            columns: list[tuple[TokenLogprobs, ...] | None] = [None] * num_reqs
            entries = entries_of(copy.wait(), [count for count in counts for _ in range(width)])
            for place, index in enumerate(asked):
                columns[index] = tuple(entries[place * width : place * width + len(blocks[index])])
            return columns

        return make


def accept(draft_tokens: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own tokens as far as the drafts are the same, and one more.

    Args:
        draft_tokens: int32 [R, W - 1], device; -1 where a request has fewer.
        target_ids: int32 [R * W], device; what the target picks after each token of the step.

    Returns:
        token_ids int32 [R, W], -1 after the last; num_new int32 [R]. In graph: yes. Sync: none.
    """
    if has_gpu_kernels(target_ids):
        from graphrunner.kernels.triton import gpu_ops

        return gpu_ops.accept_drafts(draft_tokens, target_ids)
    kept = accept_greedy(draft_tokens, target_ids.view(draft_tokens.shape[0], -1))
    return kept.token_ids, kept.num_accepted + 1
