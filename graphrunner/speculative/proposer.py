"""What proposes draft tokens. Adding one is a file with `create_proposer` and a line in `registry.PROPOSERS`.

A round, for every step of the target model that is not a chunk inside a prompt:

    verify   the target computes [last token, draft 1, ..., draft k] of each row in one step
    accept   the drafts that the target would have picked itself stay, and it adds one token (the bonus) after them;
             rows move on by what was accepted, all on the device, inside the verify graph
    propose  the proposer writes the next drafts

Two kinds of proposer, by what they read:

- `HostProposer` reads token ids on the host, after the round is resolved (n-grams).
- `DeviceProposer` reads device tensors of the step that was just launched, and leaves its drafts in
  `RequestTable.draft_tokens`; nothing of it waits for the device (draft models, EAGLE, multi-token heads).

The life of a row has one event: a `RowInit` in the step's batch takes the row into use (new request, or resumed after
preemption), before any other use of it. End, abort and preemption need no hook: nobody asks for a row's drafts until it
is taken into use again. Rejected drafts need none either: `RequestTable.num_computed` simply did not move past
them, and whatever a proposer keeps for later positions is overwritten when these are computed again.

A draft can only cost time, never change an output: verification is the same whatever is proposed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.core.scheduled_batch import RowInit, ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.kvcache.pool import KVSpec
from graphrunner.models.registry import LanguageModel
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.round_inputs import RoundKeeper
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.sampling.rows import SamplingRows
from graphrunner.weights.source import ModelSource

NO_KV = KVSpec(())

PickTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardVariant], torch.Tensor]
"""(logits float [R, V], request_rows int32 [R], positions int32 [R] of the picked tokens, variant) -> int32 [R].

The variant is GREEDY or SAMPLE. In graph: yes."""


@dataclass(frozen=True, slots=True)
class TargetNeeds:
    """What a proposer wants of every target step, beyond tokens.

    Attributes:
        hidden_states: of every token, before the final norm.
        aux_layers: outputs of these decoder layers (0 is the first), joined along the last axis.
    """

    hidden_states: bool = False
    aux_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The loaded target model, as `create_proposer` sees it.

    Attributes:
        model: its embedding and head may be shared by a draft; `model.options` says device and dtype, which the KV
            pages of the draft have as well.
        source: where it came from (a shipped draft is looked up by it).
        max_model_len: context limit, tokens.
        max_num_seqs: most rows running at once.
        seed: of dummy weights.
    """

    model: LanguageModel
    source: ModelSource
    max_model_len: int
    max_num_seqs: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer builds its runners from; handed to `bind` once the pools exist.

    Attributes:
        runner_context: the target's, with `kv_layers` of the proposer's own `kv_spec` in place of the target's: same
            page ids, same page table, one allocation. Use `dataclasses.replace` for another `forward` or `tail`.
        target_kv_layers: the target's pages, for proposers that read them.
        sampling_rows: per-row temperature, filters and seeds, device.
        pick: picks drafts as the target picks tokens, with the noise that belongs to the row and the position: random
            drafts then agree with the target about as often as the two distributions overlap. See `PickTokens`.
        account: where captured keys and replays of the proposer's runners are counted.
        new_backend: makes an execution backend for one more runner; None where graphs are off: run eagerly.
        sizes: batch sizes to capture, as the decode runner's.
        max_drafts: most drafts a round; `RequestTable.draft_tokens` has that many columns.
        is_lazy: capture at first use.
    """

    runner_context: RunnerContext
    target_kv_layers: tuple[KVLayer, ...]
    sampling_rows: SamplingRows
    pick: PickTokens
    account: GraphAccount
    new_backend: Callable[[], ExecutionBackend | None]
    sizes: tuple[int, ...]
    max_drafts: int
    is_lazy: bool = False


@dataclass(frozen=True, slots=True)
class DraftRound:
    """One launched target step, as a device proposer sees it. Nothing in it may be waited for.

    Attributes:
        batch: the step on the host. PREFILL and MIXED steps come as well: their tokens' KV is the proposer's to write,
            if it has any. `batch.row_inits` says which rows were taken into use.
        forward_batch: the step on the device, padded: the very input ids, positions, slots and lengths the target read.
            Aliasing: good until the target runner's next `load_batch`. A draft model over the same tokens runs on
            `dataclasses.replace(forward_batch, kv_layers=...)`.
        num_drafts: how many drafts the next round can verify; 0 asks only to keep the proposer's own KV complete.
        token_ids: int32 [R, W], device; what each row of the batch got: accepted drafts, then the bonus token, then -1.
            W is 1 but for VERIFY steps. Rows of a chunk inside a prompt have only -1.
        num_new: int32 [R], device; how many that are: num_accepted + 1, or 0 inside a prompt. After the step
            `table.last_token` is the newest of them and `table.num_computed` the position it will be computed at.
        hidden_states: model dtype [num_tokens, hidden_size], device; for `TargetNeeds.hidden_states`.
        aux_hidden_states: model dtype [num_tokens, len(aux_layers) * hidden_size], device; for `aux_layers`.

    Aliasing: tensors may live in graph memory of the target's runner, good until its next `execute`.
    """

    batch: ScheduledBatch
    forward_batch: ForwardBatch
    num_drafts: int
    token_ids: torch.Tensor
    num_new: torch.Tensor
    hidden_states: torch.Tensor | None = None
    aux_hidden_states: torch.Tensor | None = None


class DraftSequence(NamedTuple):
    """One row that decodes next, as a host proposer sees it.

    Attributes:
        row: its row; stable until a `RowInit` takes it into use again.
        prompt_token_ids, output_token_ids: all known tokens; a view, not a copy.
        num_drafts: most drafts wanted, at least 1.
    """

    row: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_drafts: int


class Proposer:
    """What both kinds share.

    Attributes:
        needs: what the target must hand out in every step.
        kv_spec: KV layers of its own; they live in the target's pool, under the same page ids. The scheduler has pages
            ready for the k positions from the newest token on, where there are pages to be had.
        is_branching: its drafts are the nodes of `speculative_config.draft_tree`.
    """

    needs: TargetNeeds = TargetNeeds()
    kv_spec: KVSpec = NO_KV
    is_branching: bool = False

    def bind(self, context: ProposerContext) -> None:
        """Build runners. Called once, before `capture`."""

    def runners(self) -> Sequence[BaseGraphRunner]:
        """Its graph runners: the engine captures them (lazily between steps, too), closes and accounts for them."""
        return ()

    def modules(self) -> Sequence[nn.Module]:
        """Modules whose tensors are moved to the host while the engine sleeps; those of the target may be in them."""
        return ()

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        """Forget what was kept for these rows: someone new has them. Called before the step that uses them."""

    def close(self) -> None:
        """Give back what `runners` does not hold. Idempotent."""


class HostProposer(Proposer, ABC):
    """Reads token ids on the host; called between two steps."""

    @abstractmethod
    def propose(self, sequences: Sequence[DraftSequence]) -> list[Sequence[int]]:
        """Drafts for each sequence, at most its `num_drafts`; empty when there is nothing worth verifying.

        Takes microseconds: the device waits for it.
        """


class DeviceProposer(Proposer, ABC):
    """Reads the step that was just launched."""

    @abstractmethod
    def propose(self, round_: DraftRound) -> None:
        """Write the next drafts of every row of the batch that samples into `RequestTable.draft_tokens`.

        Column j is draft j; -1 says that there is none from there on. With `num_drafts` 0 nothing needs to be written.
        Sync: none.
        """

    def keeper(self) -> RoundKeeper | None:
        """What has a verify step's recording keep whatever `propose` reads of it; None to read its outputs.

        Each copy that `propose` makes instead costs the host a launch a round.
        """
        return None

    def draft_probs(self) -> torch.Tensor | None:
        """fp32 [num_rows, max_drafts, vocab_size], device, at a fixed address: what each draft was drawn from, by row.

        None (also for greedy drafts): a draft stands when it is the token that the target's own noise picks, so that
        random requests get the very tokens they would get without speculation. With probabilities, drafts are accepted
        by rejection sampling, and must have been drawn with noise of their own, not with `ProposerContext.pick`.
        """
        return None
