"""Every replayed step once more, eagerly, at its real size: same tokens, logits, KV and rows, or a report.

A step is taken back before its second run (`StepStates`), so it counts once: rows advance once, a row's seed gives the
same noise to both runs, and what stays in the pages is what the replay wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from graphrunner.core.errors import GraphCheckError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.engine.check.compare import is_bit_equal
from graphrunner.engine.check.diagnosis import Diagnosis, Evidence, Pick
from graphrunner.engine.check.finding import Finding, FindingKind
from graphrunner.engine.check.poison import VALID_GARBAGE, PoisonedPages
from graphrunner.engine.check.step_state import StepStates
from graphrunner.runner.base_graph_runner import BaseGraphRunner, poison_output
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.sampling.sampled_tokens import SampledTokens
from graphrunner.telemetry import ranges

OUTPUT_NAMES = tuple(field.name for field in fields(ModelOutput))


@dataclass(frozen=True, slots=True)
class _HandedOut:
    """Tokens on their way to the host, and what they were when the replay wrote them."""

    evidence: Evidence
    tokens: SampledTokens
    expected: list[int]


class GraphCheck:
    """Stands between `ModelRunner` and the runners when the check is on. Sync: at every step.

    Args:
        context: of the runners.
        eager: runs the step a second time.
        account: told of each checked step.
        model: its modules name the layers of a report.
        pick: tokens of logits, as the recorded forward picks them.
        free_pages: the KV pages that nobody owns.
    """

    def __init__(
        self,
        context: RunnerContext,
        eager: BaseRunner,
        account: GraphAccount,
        *,
        model: object,
        pick: Pick,
        free_pages: Callable[[], Iterable[int]],
    ) -> None:
        self._context = context
        self._eager = eager
        self._account = account
        self._diagnosis = Diagnosis(context, eager, model, pick)
        self._pages = PoisonedPages(context, free_pages)
        self._last_outputs: dict[str, ModelOutput] = {}
        self._handed_out: _HandedOut | None = None
        self._evidence: Evidence | None = None
        self._turn = 0

    def run(self, runner: BaseRunner, batch: ScheduledBatch) -> tuple[LoadedBatch, ModelOutput]:
        """Load and execute; a replay is checked. The table has taken in the step.

        Raises:
            GraphCheckError: the first thing that differs.
        """
        self._evidence = None
        strays = self._pages.renew()
        if isinstance(runner, BaseGraphRunner):
            loaded, output = self._run_twice(runner, batch)
        else:
            with ranges.LOAD_BATCH:
                loaded = runner.load_batch(batch)
            with ranges.EXECUTE:
                output = runner.execute(loaded)
        if strays:
            evidence = Evidence(runner, batch, loaded)
            detail = "it no longer holds the poison it was filled with"
            raise _error(evidence.finding(FindingKind.STRAY_WRITE, f"page {strays[0]}", detail))
        return loaded, output

    def forget_pages(self) -> None:
        """The pages are given back: what is in them from now on is nobody's doing."""
        self._pages.forget()
        self._last_outputs.clear()

    def sampled(self, output: ModelOutput, tokens: SampledTokens) -> None:
        """The step's tokens were picked, or their copy was started.

        Raises:
            GraphCheckError: the replay's outputs changed meanwhile.
        """
        evidence = self._evidence
        if evidence is None:
            return
        self._check_intact(evidence, output)
        replayed = evidence.replayed
        if replayed is not None and replayed.token_ids is not None and evidence.batch.mode is ForwardMode.DECODE:
            self._handed_out = _HandedOut(evidence, tokens, replayed.token_ids.tolist())

    def _run_twice(self, runner: BaseGraphRunner, batch: ScheduledBatch) -> tuple[LoadedBatch, ModelOutput]:
        self._turn += 1
        states = StepStates(self._context, batch)
        before = states.take()
        if self._turn % 2:  # every other time, or the loads that steady steps save would never be seen
            runner.poison(VALID_GARBAGE)
        if runner.name in self._last_outputs:
            poison_output(self._last_outputs[runner.name])
        with ranges.LOAD_BATCH:
            loaded = runner.load_batch(batch)
        self._diagnosis.poison_padding(runner, loaded)
        with ranges.EXECUTE:
            output = runner.execute(loaded)
        self._last_outputs[runner.name] = output
        after = states.take()
        evidence = Evidence(runner, batch, loaded, copy_of(output), states, before, after)
        self._check_handed_out()
        states.put(before)
        finding = self._diagnosis.of(evidence)
        states.put(after)
        self._context.table.last_token[0] = self._context.table.num_computed[0] = 0
        if finding is not None:
            raise _error(finding)
        self._check_intact(evidence, output)
        self._account.checked()
        self._evidence = evidence
        return loaded, output

    def _check_intact(self, evidence: Evidence, output: ModelOutput) -> None:
        assert evidence.replayed is not None
        for name in OUTPUT_NAMES:
            kept, now = getattr(evidence.replayed, name), getattr(output, name)
            if kept is not None and not is_bit_equal(kept, now):
                detail = "its memory changed after the replay, before the step had used it"
                raise _error(evidence.finding(FindingKind.OUTPUT, name, detail))

    def _check_handed_out(self) -> None:
        handed, self._handed_out = self._handed_out, None
        if handed is not None and (found := handed.tokens.wait()) != handed.expected:
            detail = f"{found} were handed out, the replay had written {handed.expected}: read after the next replay"
            raise _error(handed.evidence.finding(FindingKind.OUTPUT, "token_ids", detail))


def copy_of(output: ModelOutput) -> ModelOutput:
    """The same values in memory of their own."""
    copies = {name: None if (tensor := getattr(output, name)) is None else tensor.clone() for name in OUTPUT_NAMES}
    return replace(output, **copies)


def _error(finding: Finding) -> GraphCheckError:
    return GraphCheckError(str(finding))
