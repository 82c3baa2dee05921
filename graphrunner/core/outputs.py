"""What comes out: of a forward, of a step, of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from graphrunner.core.graph_miss import GraphMiss
from graphrunner.core.request import FinishReason
from graphrunner.core.shape_key import ForwardMode, ShapeKey

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What one forward returns, cut to the real rows by `execute`.

    Attributes:
        logits: fp32 or model dtype [num_reqs, vocab_size], device; one row a request (its last query token); of
            a VERIFY step [num_tokens, vocab_size].
        token_ids: int32 [num_reqs], device; when sampling was part of the forward. Of a VERIFY step
            [num_reqs, query_width]: the accepted drafts, the token that the target adds, then -1.
        num_new: int32 [num_reqs], device; beside the token_ids of a VERIFY step: how many of them there are.
        hidden_states: model dtype [num_tokens, hidden_size], device, before the final norm; when the variant is HIDDEN,
            or when a proposer reads them.
        aux_hidden_states: model dtype [num_tokens, n * hidden_size], device; outputs of n inner layers, for a proposer.

    Aliasing: tensors of a graph runner live in graph memory, which the next `execute` of any runner of the same pool
    may overwrite.
    """

    logits: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    num_new: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    aux_hidden_states: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural-log probability under the raw logits.
        rank: 1 for the likeliest.
        top: the likeliest tokens, best first: (token_id, logprob).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class TokenHandle(Protocol):
    """Sampled tokens that may still be on their way to the host."""

    def wait(self) -> list[int]:
        """Block until the copy is in; one id a sampled row, in batch order. Sync: waits for the step."""
        ...


class BlockHandle(Protocol):
    """What a VERIFY step yields, maybe still on its way to the host."""

    def wait_blocks(self) -> list[list[int]]:
        """Block until the copy is in: per request of the batch, its accepted drafts and one more token. Sync: yes."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationBatchResult:
    """One finished (or launched) step.

    Attributes:
        tokens: one id for each request of the batch whose `samples` is True, in batch order; for VERIFY steps blocks.
        can_run_cuda_graph: whether a recorded graph ran (of any device: the field's established name).
        runner: the name of the runner that took the step.
        key: the shape it ran at; exact size for eager.
        miss_reason: why no graph ran; None when one did.
        logprobs: per request, the logprobs of its tokens of this step, in order; None where not asked.
        prompt_logprobs: per request, (first position, entries) for the prompt tokens computed in this step.
        embeddings: per request, the pooled hidden states of a prompt that ended in this step; empty when none did.
        num_proposed: how many drafts were asked for behind this step, of a proposer on the device.
    """

    tokens: TokenHandle | BlockHandle
    can_run_cuda_graph: bool
    runner: str
    key: ShapeKey
    miss_reason: GraphMiss | None = None
    logprobs: Sequence[tuple[TokenLogprobs, ...] | None] = ()
    prompt_logprobs: Sequence[tuple[int, tuple[TokenLogprobs, ...]] | None] = ()
    embeddings: Sequence[tuple[float, ...] | None] = ()
    num_proposed: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the engine's own account: which graph ran, and why not.

    Attributes:
        num_drafts: of a VERIFY step, draft tokens verified.
        accepted_lengths: of a VERIFY step, for each request with drafts how many of them stand, none past its end.
    """

    step_id: int
    mode: ForwardMode
    runner: str
    key: ShapeKey
    num_reqs: int
    num_tokens: int
    is_graph: bool
    miss_reason: GraphMiss | None
    start_s: float
    duration_ms: float
    request_ids: tuple[str, ...] = ()
    num_drafts: int = 0
    accepted_lengths: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Draft tokens that stand; the tokens that the target adds are not counted."""
        return sum(self.accepted_lengths)

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed for nobody."""
        return self.key.num_tokens - self.num_tokens


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step adds to one request; plain data, ready to cross a process border.

    Attributes:
        new_token_ids: tokens to append; may be empty when the request only ends.
        logprobs: one entry a new token when asked for.
        prompt_logprobs: entries of newly computed prompt positions, from position `prompt_logprobs_start`.
        finish_reason, stop_reason: set on the last output of the request.
        error: what went wrong, when finish_reason is ERROR.
        embedding: the pooled hidden states of an embedding request, on its last output.
        num_drafts, num_accepted: drafts that this step verified for the request, and those that stand.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs_start: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    embedding: tuple[float, ...] | None = None
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Logprob:
    """One entry of the user-facing logprobs, named as in vLLM."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class SpeculationStats:
    """What became of one output's drafts; the token that the target adds in each round is not counted.

    Attributes:
        num_drafts: draft tokens verified.
        num_accepted: of those, how many stand.
        accepted_lengths: entry n: rounds in which n drafts stood.
        drafted_lengths: entry n: rounds that verified n drafts.
    """

    num_drafts: int = 0
    num_accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_lengths: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one round."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for counts, length in ((self.accepted_lengths, num_accepted), (self.drafted_lengths, num_drafts)):
            if length >= len(counts):
                counts.extend([0] * (length + 1 - len(counts)))
            counts[length] += 1

    @property
    def num_rounds(self) -> int:
        """Rounds with at least one draft."""
        return sum(self.accepted_lengths)

    @property
    def mean_accepted_length(self) -> float:
        """Drafts that stood a round; a round's tokens are one more."""
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` outputs of a prompt.

    Attributes:
        speculation: what became of its drafts; None when none was verified.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationStats | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and everything generated for it so far; of an embedding request, its vector in place of text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt as a vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for a prompt, named as in vLLM."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
