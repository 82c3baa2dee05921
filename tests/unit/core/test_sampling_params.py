"""Every bad value is refused where it is made, by one line that names the field and the value."""

import dataclasses
import math

import pytest

from graphrunner.core.errors import ConfigError, GraphRunnerError, InvalidRequestError
from graphrunner.core.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams, StructuredOutput

NAN, INF, HUGE = math.nan, math.inf, 10**400
UNPRINTABLE = 10**5000

BAD = [
    *[("n", value) for value in (0, -1, MAX_N + 1, 100_000, 1.5, "2", True, None, NAN)],
    *[("temperature", value) for value in (-1, -1e-9, 101, NAN, INF, -INF, "1", None, True, HUGE)],
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.0001, 2, NAN, INF, "1", None, HUGE)],
    *[("top_k", value) for value in (-5, -2, 2.0, 1 << 40, "5", None, True, NAN)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, INF, None, HUGE)],
    *[("repetition_penalty", value) for value in (0, -1, NAN, INF, 1e9, None, HUGE)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, None, "0")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, None, -HUGE)],
    *[("max_tokens", value) for value in (0, -1, 1.0, "16", NAN, 1 << 40, True)],
    *[("min_tokens", value) for value in (-1, 17, 1.5, None, NAN, True)],
    *[("seed", value) for value in (1 << 63, -(1 << 63) - 1, 1.5, "7", True, NAN)],
    *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, 1_000_000, 1.0, "5", NAN, True)],
    *[("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1, 1_000_000, 1.0, True)],
    *[("stop", value) for value in ("", [""], ["a", "", "b"], [None], [1], ["x"] * 65, 5, b"a", {"a": 1}, True)],
    *[("stop_token_ids", value) for value in ([-1], [1.5], ["1"], "12", [True], [None], [1 << 40], 5, {"a": 1})],
    *[("logit_bias", value) for value in ({-1: 1}, {"AI": 1}, {1.5: 1}, {5: 101}, {5: -101}, {5: NAN}, {5: "1"}, [5])],
    *[("logit_bias", value) for value in ({5: None}, {True: 1}, {1 << 40: 1}, 5, "5", {5: HUGE})],
    *[("ignore_eos", value) for value in (None, "yes", 1)],
    *[("detokenize", value) for value in (None, "no", 0)],
    *[("skip_special_tokens", value) for value in (None, "no", 0)],
    *[("spaces_between_special_tokens", value) for value in (None, "no", 0)],
    *[("include_stop_str_in_output", value) for value in (None, "no", 0)],
    *[(field, UNPRINTABLE) for field in ("n", "temperature", "seed", "top_k", "max_tokens")],
    *[("structured_output", value) for value in ("{}", {"regex": "a"}, 5)],
]


@pytest.mark.parametrize(
    "field, value", BAD, ids=lambda value: "10**5000" if value is UNPRINTABLE else repr(value)[:30]
)
def test_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field) and "\n" not in message and len(message) < 250
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, GraphRunnerError)


GOOD = [
    *[("temperature", value) for value in (0, 0.0, 1e-9, 2, 100)],
    *[("top_p", value) for value in (1, 1.0, 1e-9)],
    *[("top_k", value) for value in (-1, 0, 1, 10**6)],
    *[("min_p", value) for value in (0, 1, 0.5)],
    *[("logprobs", value) for value in (None, 0, MAX_LOGPROBS)],
    *[("prompt_logprobs", value) for value in (None, 0, MAX_LOGPROBS)],
    *[("logit_bias", value) for value in (None, {}, {0: -100, 7: 100.0})],
    *[("stop", value) for value in (None, [], (), "a", ["a", "b"], ("a",))],
    *[("stop_token_ids", value) for value in (None, [], [0, 5], (1,))],
    *[("seed", value) for value in (None, 0, (1 << 63) - 1, -(1 << 63))],
    *[("max_tokens", value) for value in (None, 1, 10**6)],
    *[("n", value) for value in (1, MAX_N)],
]


@pytest.mark.parametrize("field, value", GOOD, ids=lambda value: repr(value)[:30])
def test_accepted(field, value):
    SamplingParams(**{field: value})


def test_no_stop_is_no_stop():
    for stop in (None, [], ()):
        assert SamplingParams(stop=stop).stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_fields_that_exclude_each_other():
    for bad in (
        {"stop": "a", "detokenize": False},
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 1, "structured_output": StructuredOutput(regex="a")},
    ):
        with pytest.raises(InvalidRequestError):
            SamplingParams(**bad)
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {100: 1.0}}, {"stop_token_ids": [105], "min_tokens": 1}, {"stop_token_ids": [100]}],
    ids=str,
)
def test_token_ids_the_model_does_not_have(params):
    made = SamplingParams(**params)
    made.check_vocab(200)
    with pytest.raises(InvalidRequestError, match=f"{next(iter(params))}=10.*from 0 to 99"):
        made.check_vocab(100)
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[0]).check_vocab(100)


def test_params_do_not_change_with_what_they_were_made_from():
    bias, stop, ids = {5: 1.0}, ["a"], [3]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[10**9], stop[0] = 7.0, ""
    ids.append(-1)
    assert dict(params.logit_bias or {}) == {5: 1.0} and params.stop_strings == ("a",) and params.stop_token_ids == (3,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_clone_checks_again():
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert (
        params.clone(n=3).n == 3 and params.clone(n=3).temperature == 0.5 and params.clone(n=3).stop_strings == ("a",)
    )
    assert params.clone(stop=None).stop_strings == ()
    with pytest.raises(InvalidRequestError, match="top_p"):
        params.clone(top_p=0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "grammar": "b"},
        {"regex": 5},
        {"json_schema": {}},
        {"choice": "ab"},
        {"choice": ("a", 1)},
        {"choice": ()},
    ],
    ids=str,
)
def test_structured_output_is_one_shape(given):
    with pytest.raises(InvalidRequestError, match="structured_output"):
        StructuredOutput(**given)


def test_structured_output_can_be_a_key():
    assert StructuredOutput(choice=("a",)) == StructuredOutput(choice=("a",))
    assert len({StructuredOutput(regex="a"), StructuredOutput(regex="a")}) == 1


def test_errors_show_long_values_short():
    assert len(str(InvalidRequestError("stop", "x" * 10_000, "is too long"))) < 150
    error = ConfigError("page_size", 0, "must be at least 1")
    assert str(error) == "page_size=0: must be at least 1" and (error.field, error.value) == ("page_size", 0)
