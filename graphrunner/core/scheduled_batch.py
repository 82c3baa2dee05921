"""One step as host integers: what the scheduler decided and every rank receives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from graphrunner.core.pooling import Pooling
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.shape_key import ForwardMode


class SamplingNeed(Enum):
    """The least that can sample a whole batch."""

    GREEDY = "greedy"  # every sampled row takes the argmax of the raw logits
    RANDOM = "random"  # temperature, top-k, top-p, min-p; nothing that depends on earlier tokens
    LOGITS = "logits"  # penalties, bias, logprobs, min_tokens or a grammar need the logits themselves


@dataclass(frozen=True, slots=True)
class RowInit:
    """A row of the request table taken into use in this step (a new or a resumed request)."""

    row: int
    request_id: str
    sampling_params: SamplingParams
    seed: int  # resolved: the request's own, or one drawn when it was admitted
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # not empty after preemption
    pages: tuple[int, ...]  # every page the request owns at this point, in order
    pooling: Pooling | None = None  # an embedding request


@dataclass(frozen=True, slots=True)
class PageAppend:
    """Pages added to a row that is in use: `pages` go to columns `start`, `start + 1`, ..."""

    row: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step, columns of equal length `num_reqs`; decode rows stand before prompt chunks.

    A request computes tokens [cached_len, cached_len + query_len) of its sequence.

    A VERIFY step computes the same number of tokens for every request: its last token, its drafts, and padding where it
    has fewer drafts than others. Drafts are on the device, in `RequestTable.draft_tokens`.

    Attributes:
        step_id: counts from 0; names the step in traces.
        mode: see `ForwardMode`.
        request_ids, rows: whose rows; a row index is stable while the request runs, row 0 is the dummy.
        cached_lens: tokens whose KV already exists when this step starts.
        query_lens: tokens computed in this step, at least 1.
        input_ids: the query tokens, flat, `num_tokens` long; -1 where the token is the row's last sampled one, which
            only the device knows yet. Empty for decode and verify steps (all would be -1).
        samples: whether the step yields a token for the request (False for a chunk that does not end its prompt).
        sampling_need: the least sampler that serves every row with `samples`.
        needs_all_logits: some request wants prompt logprobs of tokens computed in this step.
        needs_hidden_states: some request pools hidden states (embeddings).
        row_inits, page_appends: what changed in the request table since the previous step.
        num_draft_tokens: VERIFY only: per request, how many of its query tokens are drafts.
        draft_token_ids: VERIFY only: per request, its drafts, to be stored in the request table; empty when a proposer
            on the device stored them there itself.
    """

    step_id: int
    mode: ForwardMode
    request_ids: tuple[str, ...]
    rows: tuple[int, ...]
    cached_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    input_ids: tuple[int, ...]
    samples: tuple[bool, ...]
    sampling_need: SamplingNeed
    needs_all_logits: bool = False
    needs_hidden_states: bool = False
    row_inits: tuple[RowInit, ...] = ()
    page_appends: tuple[PageAppend, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()
    draft_token_ids: tuple[Sequence[int], ...] = ()
    num_reqs: int = field(init=False)
    num_tokens: int = field(init=False)
    max_query_len: int = field(init=False)
    max_seq_len: int = field(init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "num_reqs", len(self.rows))
        put(self, "num_tokens", sum(self.query_lens))
        put(self, "max_query_len", max(self.query_lens, default=0))
        put(self, "max_seq_len", max(map(int.__add__, self.cached_lens, self.query_lens), default=0))
