"""From token ids to what a user sees: text that fits its tokens, stop strings, fan-in, kinds of output."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.core.outputs import EngineOutput, TokenLogprobs
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.output_processor import OutputProcessor, RequestOutputKind
from graphrunner.engine.sequence_ids import sequence_ids, sequence_seeds
from graphrunner.telemetry.metrics import EngineMetrics
from graphrunner.tokenizer.tokenizer import Tokenizer

WORDS = ["Hello", " wor", "ld", "!", " It", " is", " a", " nice", " day", "<end>", "\u00e9", " stop"]
END = WORDS.index("<end>")
TEXT_IDS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
TEXT = "Hello world! It is a nice day"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    spelled = ["".join(_byte_letter(byte) for byte in word.encode()) for word in WORDS]
    vocabulary = {word: i for i, word in enumerate([*spelled, *sorted(set(letters) - set(spelled))])}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.decoder = decoders.ByteLevel()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(fast, special_ids=frozenset({END}), eos_token_ids=(END,))


def _byte_letter(byte: int) -> str:
    """The printable letter that byte-level BPE writes for a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return chr(byte) if byte in plain else chr(256 + others.index(byte))


class Talk:
    """One request fed by hand."""

    def __init__(self, tokenizer, params=None, kind=RequestOutputKind.CUMULATIVE, metrics=None):
        self.processor = OutputProcessor(metrics)
        self.params = params or SamplingParams()
        self.processor.add_request("q", "Hi", [1, 2, 3], self.params, kind, tokenizer)
        self.shown = []
        self.to_finish = []

    def feed(self, *ids, request_id="q", **rest):
        entries = tuple(TokenLogprobs(i, -0.5, 2, ((9, -0.1), (i, -0.5))) for i in ids)
        logprobs = entries if self.params.logprobs is not None else None
        done = self.processor.process([EngineOutput(request_id, tuple(ids), logprobs, **rest)])
        self.shown += done.outputs
        self.to_finish += done.to_finish
        return done

    @property
    def final(self):
        assert self.shown[-1].finished
        return self.shown[-1].outputs[0]


def test_cumulative_outputs_are_values(tokenizer):
    talk = Talk(tokenizer)
    for token_id in TEXT_IDS[:4]:
        talk.feed(token_id)
    talk.feed(END, finish_reason=FinishReason.STOP)
    assert [output.outputs[0].text for output in talk.shown][:3] == ["Hello", "Hello wor", "Hello world"]
    assert [len(output.outputs[0].token_ids) for output in talk.shown] == [1, 2, 3, 4, 5]
    assert talk.final.text == "Hello world!" and talk.final.finish_reason == "stop" and talk.final.stop_reason is None
    assert talk.processor.process([EngineOutput("q", (1,))]).outputs == [], "the request is gone"


def test_delta_outputs_join(tokenizer):
    talk = Talk(tokenizer, SamplingParams(logprobs=1), RequestOutputKind.DELTA)
    talk.feed(*TEXT_IDS[:3])
    talk.feed(*TEXT_IDS[3:5])
    talk.feed(*TEXT_IDS[5:], finish_reason=FinishReason.LENGTH)
    parts = [output.outputs[0] for output in talk.shown]
    assert "".join(part.text for part in parts) == TEXT
    assert [i for part in parts for i in part.token_ids] == list(TEXT_IDS)
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
    assert [part.finish_reason for part in parts] == [None, None, "length"]


def test_final_only_is_one_output(tokenizer):
    talk = Talk(tokenizer, kind=RequestOutputKind.FINAL_ONLY)
    talk.feed(0, 1)
    assert talk.shown == []
    talk.feed(2, finish_reason=FinishReason.LENGTH)
    assert len(talk.shown) == 1 and talk.final.text == "Hello world"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_stop_strings_cut_text_and_tokens_together(tokenizer, data):
    """Any piece of the text as stop, any split into steps: the same text, tokens up to the one that completed it."""
    start = data.draw(st.integers(0, len(TEXT) - 1))
    stop = TEXT[start : data.draw(st.integers(start + 1, len(TEXT)))]
    is_included = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(list(RequestOutputKind)))
    talk = Talk(tokenizer, SamplingParams(stop=stop, include_stop_str_in_output=is_included, logprobs=2), kind)
    ids = list(TEXT_IDS)
    while not (talk.shown and talk.shown[-1].finished):
        count = data.draw(st.integers(1, 4))
        talk.feed(*ids[:count], finish_reason=None if ids[count:] else FinishReason.LENGTH)
        del ids[:count]
    parts = [output.outputs[0] for output in talk.shown]
    if kind is not RequestOutputKind.DELTA:
        parts = parts[-1:]
    end = TEXT.index(stop) + len(stop)
    assert "".join(part.text for part in parts) == TEXT[: end if is_included else end - len(stop)]
    assert parts[-1].finish_reason == "stop" and parts[-1].stop_reason == stop
    token_ids = [i for part in parts for i in part.token_ids]
    assert len([entry for part in parts for entry in part.logprobs]) == len(token_ids)
    assert len(tokenizer.decode(token_ids[:-1])) < end <= len(tokenizer.decode(token_ids))
    assert talk.to_finish == (["q"] if ids else []), "the engine is told unless it had ended the request itself"


def test_text_is_not_held_back_for_a_stop_that_does_not_begin(tokenizer):
    talk = Talk(tokenizer, SamplingParams(stop="zzzzzzzz"), RequestOutputKind.DELTA)
    talk.feed(0)
    assert talk.shown[0].outputs[0].text == "Hello"


def test_a_near_miss_comes_out_at_the_end(tokenizer):
    talk = Talk(tokenizer, SamplingParams(stop=" day!"), RequestOutputKind.DELTA)
    talk.feed(*TEXT_IDS)
    talk.feed(finish_reason=FinishReason.LENGTH)
    assert [output.outputs[0].text for output in talk.shown] == [TEXT[:-4], " day"]
    assert talk.final.finish_reason == "length"


def test_stop_strings_wait_for_min_tokens(tokenizer):
    talk = Talk(tokenizer, SamplingParams(stop="o", min_tokens=3))
    talk.feed(*TEXT_IDS[:3])
    assert talk.to_finish == [] and talk.shown[-1].outputs[0].text == "Hello world"
    talk.feed(0)
    assert talk.to_finish == ["q"] and talk.final.text == "Hello worldHell"


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_is_counted_but_not_spelled(tokenizer, is_included):
    params = SamplingParams(stop_token_ids=[3], include_stop_str_in_output=is_included)
    talk = Talk(tokenizer, params)
    talk.feed(0, 1, 2, 3, finish_reason=FinishReason.STOP, stop_reason=3)
    assert talk.final.text == ("Hello world!" if is_included else "Hello world")
    assert talk.final.token_ids == [0, 1, 2, 3] and talk.final.stop_reason == 3


def test_the_end_token_is_not_spelled_even_when_special_tokens_are(tokenizer):
    talk = Talk(tokenizer, SamplingParams(skip_special_tokens=False))
    talk.feed(END, 0, END, finish_reason=FinishReason.STOP)
    assert talk.final.text == "<end>Hello"


def test_a_torn_character_is_flushed_once(tokenizer):
    half = tokenizer.backend.token_to_id(_byte_letter(0xC3))
    talk = Talk(tokenizer, kind=RequestOutputKind.DELTA)
    talk.feed(0, half)
    talk.feed(finish_reason=FinishReason.LENGTH)
    assert [output.outputs[0].text for output in talk.shown] == ["Hello", "\ufffd"]


def test_logprobs_by_name(tokenizer):
    talk = Talk(tokenizer, SamplingParams(logprobs=2, prompt_logprobs=1))
    entries = tuple(TokenLogprobs(i, -1.0, 1, ((i, -1.0),)) for i in (2, 3))
    talk.feed(0, prompt_logprobs=entries, prompt_logprobs_start=1, num_cached_tokens=2)
    talk.feed(1, finish_reason=FinishReason.LENGTH)
    first = talk.final.logprobs[0]
    assert list(first) == [0, 9] and first[0].rank == 2 and first[9].rank == 1
    assert (first[0].decoded_token, first[9].decoded_token) == ("Hello", "<end>")
    assert talk.final.cumulative_logprob == pytest.approx(-1.0)
    prompt = talk.shown[-1].prompt_logprobs
    assert prompt[0] is None and [list(entry) for entry in prompt[1:]] == [[2], [3]]
    assert talk.shown[-1].num_cached_tokens == 2


def test_prompt_logprobs_computed_again_change_nothing(tokenizer):
    talk = Talk(tokenizer, SamplingParams(prompt_logprobs=0))
    entry = TokenLogprobs(2, -1.0, 1, ())
    talk.feed(prompt_logprobs=(entry,), prompt_logprobs_start=1)
    talk.feed(0, prompt_logprobs=(entry, entry), prompt_logprobs_start=1, finish_reason=FinishReason.LENGTH)
    assert len(talk.shown[-1].prompt_logprobs) == 3


def test_n_outputs_are_gathered(tokenizer):
    talk = Talk(tokenizer, SamplingParams(n=3))
    ids = sequence_ids("q", 3)
    done = talk.processor.process([EngineOutput(child, (place,)) for place, child in enumerate(ids)])
    assert [out.text for out in done.outputs[0].outputs] == ["Hello", " wor", "ld"] and len(done.outputs) == 1
    for place, child in enumerate(ids):
        done = talk.feed(3, request_id=child, finish_reason=FinishReason.LENGTH)
        assert done.outputs[0].finished is (place == 2)
    assert [out.index for out in talk.shown[-1].outputs] == [0, 1, 2]
    assert talk.processor.remove_request("q") == []


def test_sequences_have_seeds_of_their_own():
    seeds = [sequence_seeds(seed, 8) for seed in range(50)]
    assert seeds[7] == sequence_seeds(7, 8)
    flat = [seed for each in seeds for seed in each]
    assert len(set(flat)) == len(flat) and all(-(2**63) <= seed < 2**63 for seed in flat)
    assert (sequence_ids("q", 1), sequence_seeds(9, 1)) == (["q"], [9])
    assert (sequence_ids("q", 2), seeds[9][0]) == (["q#0", "q#1"], 9)
    assert len(set(sequence_seeds(-(2**63), 128))) == 128


def test_removed_requests_are_silent(tokenizer):
    talk = Talk(tokenizer, SamplingParams(n=2))
    assert talk.processor.remove_request("q") == ["q#0", "q#1"]
    assert talk.feed(0, request_id="q#0").outputs == [] and talk.processor.remove_request("q") == []


def test_an_error_is_told(tokenizer):
    talk = Talk(tokenizer)
    talk.feed(0)
    talk.feed(finish_reason=FinishReason.ERROR, error="RuntimeError: broken")
    assert talk.final.finish_reason == "error" and talk.final.stop_reason == "RuntimeError: broken"
    assert talk.final.token_ids == [0]


@pytest.mark.parametrize("params", [SamplingParams(detokenize=False), SamplingParams()], ids=["asked", "none there"])
def test_without_text(tokenizer, params):
    talk = Talk(tokenizer if not params.detokenize else None, params)
    talk.feed(0, 1, finish_reason=FinishReason.LENGTH)
    assert talk.final.text == "" and talk.final.token_ids == [0, 1]


def test_metrics_hear_of_tokens_and_ends(tokenizer):
    metrics = EngineMetrics()
    talk = Talk(tokenizer, metrics=metrics)
    talk.feed(0, num_cached_tokens=2)
    talk.feed(1, 2)
    talk.feed(3, finish_reason=FinishReason.LENGTH)
    read = metrics.registry.get_sample_value
    assert read("graphrunner_time_to_first_token_seconds_count") == 1
    assert read("graphrunner_inter_token_seconds_count") == 3
    assert read("graphrunner_output_tokens_total") == 4
    assert read("graphrunner_prompt_tokens_total") == 3 and read("graphrunner_prompt_tokens_cached_total") == 2
    assert read("graphrunner_requests_finished_total", {"reason": "length"}) == 1
