"""One sequence being generated, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import Enum

from graphrunner.core.pooling import Pooling
from graphrunner.core.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request is. Only FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended; the value is what the API shows."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """State of one sequence. Owned by the scheduler; everyone else reads.

    Attributes:
        request_id: unique among the requests in the engine.
        prompt_token_ids: not empty; every id is below the vocabulary size.
        sampling_params: with `max_tokens` as the user gave it.
        max_new_tokens: resolved limit: never more than the context leaves.
        eos_token_ids: ids that end it unless `ignore_eos`.
        seed: resolved seed of its noise.
        priority: lower is served first; equal priorities by the fairness policy.
        arrival_s: monotonic seconds at admission.
        output_token_ids: tokens known on the host.
        num_pending_tokens: tokens being sampled by steps whose result is not in yet (overlap).
        cached_len: tokens whose KV exists or is being written by a launched step.
        pages: KV pages, in order; the request holds one reference to each, the prefix cache may hold another.
        num_cached_tokens: prompt tokens found in the prefix cache when it first ran; -1 before.
        row: its row in the request table while it runs; 0 otherwise.
        stop_reason: the stop string or id that ended it.
        pooling: an embedding request: no token is sampled, its hidden states come back as one vector.
        resolved_len: tokens whose KV was written by a step whose result is in; only these may be shared.
        arrival_index: order of admission.
        queued_step: step at which it was admitted; its age for the fairness policy.
        preempted_step: first step scheduled after its latest preemption.
        decode_until: the `cached_len` at which a decode row needs a page or has reached its end.
        stop_ids: every id that ends it, the model's own included unless `ignore_eos`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    arrival_s: float = 0.0
    pooling: Pooling | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0
    cached_len: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    row: int = 0
    resolved_len: int = 0
    arrival_index: int = 0
    queued_step: int = 0
    preempted_step: int = -1
    decode_until: int = 0
    stop_ids: frozenset[int] = frozenset()

    @property
    def wants_pooling(self) -> bool:
        """Whether it is an embedding request."""
        return self.pooling is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and known output, tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def final_len(self) -> int:
        """Tokens whose KV it needs at most: the last new token is never fed back."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be computed for it."""
        return self.status is RequestStatus.FINISHED
