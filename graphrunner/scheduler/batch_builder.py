"""From requests to the columns of a `ScheduledBatch`."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphrunner.core.draft_plan import DraftPlan
from graphrunner.core.request import Request
from graphrunner.core.scheduled_batch import PageAppend, RowInit, SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.scheduler.sampling_need import sampling_need_of, stronger_need


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Columns of the decode rows that stay the same while nobody joins or leaves."""

    requests: tuple[Request, ...] = ()
    request_ids: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    query_lens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    need: SamplingNeed = SamplingNeed.GREEDY

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "DecodeColumns":
        """Columns for `requests`, the longest first.

        All of them grow alike, so the order lasts. A device that starts them in this order is not left with a long one
        at the end, when the others are done.
        """
        requests = sorted(requests, key=lambda request: -request.cached_len)
        return cls(
            requests=tuple(requests),
            request_ids=tuple(request.request_id for request in requests),
            rows=tuple(request.row for request in requests),
            query_lens=(1,) * len(requests),
            samples=(True,) * len(requests),
            need=need_of_all(requests),
        )


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Known tokens [start, start + length) of one request, computed in this step.

    Attributes:
        ends_prompt: the chunk holds the last known token, so the step yields the next one.
        row_init: set on the first chunk of a request that takes its row in this step.
    """

    request: Request
    start: int
    length: int
    ends_prompt: bool
    row_init: RowInit | None

    @property
    def samples(self) -> bool:
        """Whether a token is drawn after it."""
        return self.ends_prompt and not self.request.wants_pooling

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The chunk's tokens."""
        prompt = self.request.prompt_token_ids
        end = self.start + self.length
        if end <= len(prompt):
            return prompt[self.start : end]
        return (*prompt, *self.request.output_token_ids)[self.start : end]


def build_verify_batch(
    step_id: int,
    decode: DecodeColumns,
    cached_lens: tuple[int, ...],
    drafts: DraftPlan,
    page_appends: tuple[PageAppend, ...],
) -> ScheduledBatch:
    """One step of decode rows that verify drafts, each padded to the plan's width."""
    return ScheduledBatch(
        step_id=step_id,
        mode=ForwardMode.VERIFY,
        request_ids=decode.request_ids,
        rows=decode.rows,
        cached_lens=cached_lens,
        query_lens=(drafts.query_width,) * len(decode.rows),
        input_ids=(),
        samples=decode.samples,
        sampling_need=decode.need,
        page_appends=page_appends,
        num_draft_tokens=drafts.num_drafts,
        draft_token_ids=drafts.token_ids,
    )


def build_batch(
    step_id: int,
    decode: DecodeColumns,
    decode_cached_lens: tuple[int, ...],
    chunks: Sequence[PromptChunk],
    page_appends: tuple[PageAppend, ...],
) -> ScheduledBatch:
    """One step: the decode rows, one token each, then the prompt chunks."""
    if not chunks:
        return ScheduledBatch(
            step_id=step_id,
            mode=ForwardMode.DECODE,
            request_ids=decode.request_ids,
            rows=decode.rows,
            cached_lens=decode_cached_lens,
            query_lens=decode.query_lens,
            input_ids=(),
            samples=decode.samples,
            sampling_need=decode.need,
            page_appends=page_appends,
        )
    input_ids = [-1] * len(decode.rows)
    for chunk in chunks:
        input_ids.extend(chunk.token_ids)
    chunk_need = need_of_all([chunk.request for chunk in chunks if chunk.samples])
    return ScheduledBatch(
        step_id=step_id,
        mode=ForwardMode.MIXED if decode.rows else ForwardMode.PREFILL,
        request_ids=decode.request_ids + tuple(chunk.request.request_id for chunk in chunks),
        rows=decode.rows + tuple(chunk.request.row for chunk in chunks),
        cached_lens=decode_cached_lens + tuple(chunk.start for chunk in chunks),
        query_lens=decode.query_lens + tuple(chunk.length for chunk in chunks),
        input_ids=tuple(input_ids),
        samples=decode.samples + tuple(chunk.samples for chunk in chunks),
        sampling_need=stronger_need(decode.need, chunk_need),
        needs_all_logits=any(wants_prompt_logprobs(chunk.request) for chunk in chunks),
        needs_hidden_states=any(chunk.request.wants_pooling for chunk in chunks),
        row_inits=tuple(chunk.row_init for chunk in chunks if chunk.row_init is not None),
        page_appends=page_appends,
    )


def row_init_of(request: Request) -> RowInit:
    """Everything the device needs to take the request's row into use."""
    return RowInit(
        row=request.row,
        request_id=request.request_id,
        sampling_params=request.sampling_params,
        seed=request.seed,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=tuple(request.output_token_ids),
        pages=tuple(request.pages),
        pooling=request.pooling,
    )


def need_of_all(requests: Sequence[Request]) -> SamplingNeed:
    """The least sampler for all of them; GREEDY for none."""
    need = SamplingNeed.GREEDY
    for request in requests:
        need = stronger_need(need, sampling_need_of(request.sampling_params, bool(request.stop_ids)))
    return need


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether its prompt's logprobs are still to come; all are in once it has an output token."""
    return request.sampling_params.prompt_logprobs is not None and not request.output_token_ids
