"""Random request streams against the scheduler: pages never leak, never have two owners, and answers never change."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_fake import EOS_IDS, FakeEngine, solo

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.request import FinishReason

PROMPTS = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=40).map(tuple) | st.builds(
    lambda length: (1,) * length, st.integers(1, 40)
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and breaks; after every rule the books must balance."""

    @initialize(
        pool_len=st.integers(8, 160),
        page_size=st.sampled_from((1, 3, 16)),
        max_num_seqs=st.integers(1, 5),
        chunk_len=st.integers(1, 24),
        max_model_len=st.integers(8, 64),
        depth=st.integers(0, 1),
        has_prefix_cache=st.booleans(),
        prompts_first=st.booleans(),
        first_prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    )
    def build(self, pool_len, page_size, first_prompts, **setup):
        self.engine = FakeEngine(num_pages=2 + pool_len // page_size, page_size=page_size, **setup)
        for prompt in first_prompts:
            self.add(prompt, max_tokens=20)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=st.sampled_from((None, None, 0)),
    )
    def add(self, prompt, max_tokens, *, priority=0, ignore_eos=True, min_tokens=0, prompt_logprobs=None):
        try:
            self.engine.add(
                prompt,
                max_tokens,
                priority=priority,
                ignore_eos=ignore_eos,
                min_tokens=min(min_tokens, max_tokens),
                prompt_logprobs=prompt_logprobs,
            )
        except InvalidRequestError as error:
            assert "tokens" in str(error)

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.engine.step()

    @rule()
    def launch(self):
        """Up to one step more on the way than the loop would have."""
        if len(self.engine.pending) <= self.engine.depth:
            self.engine.launch()

    @precondition(lambda self: self.engine.pending)
    @rule()
    def resolve(self):
        self.engine.resolve()

    @precondition(lambda self: self.engine.served)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.engine.served)))
        was_live = self.engine.reason(request_id) is None
        assert self.engine.abort(request_id) == was_live
        assert not self.engine.abort(request_id)

    @precondition(lambda self: self.engine.pending)
    @rule()
    def break_step(self):
        """A launched step raises: what it may have touched ends, the rest goes on."""
        self.engine.break_pending()

    @precondition(lambda self: not self.engine.scheduler.has_unfinished_requests())
    @rule()
    def reset_idle_cache(self):
        self.engine.cache.reset()

    @invariant()
    def books_balance(self):
        if hasattr(self, "engine"):  # there is none before `build`
            self.engine.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        stats = self.engine.scheduler.stats()
        event(f"preempted: {stats.num_preemptions > 0}")
        event(f"prefix hit: {stats.num_prefix_hit_tokens > 0}")
        event(f"requests: {min(len(self.engine.served), 5)}")
        for served in self.engine.served.values():
            check_answer(served)


def check_answer(served):
    """Token for token what the prompt yields alone, up to its own end."""
    request = served.request
    expected = solo(request.prompt_token_ids, request.max_new_tokens)
    assert served.tokens == expected[: len(served.tokens)]
    assert served.tokens == request.output_token_ids
    min_tokens = request.sampling_params.min_tokens
    ends = [
        index + 1
        for index, token_id in enumerate(expected)
        if token_id in EOS_IDS and index + 1 >= min_tokens and not request.sampling_params.ignore_eos
    ]
    expected_len = min([*ends, request.max_new_tokens])
    if served.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert len(served.tokens) <= expected_len
    else:
        assert len(served.tokens) == expected_len
        assert served.finish_reason is (FinishReason.STOP if expected_len in ends else FinishReason.LENGTH)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
