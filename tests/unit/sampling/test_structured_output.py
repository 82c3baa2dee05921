"""Grammars: what is sampled has the shape, alone and in a batch, from any logits."""

import json
import re

import pytest
import torch
from batches import decode_batch, generate, row_init

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.sampling_params import SamplingParams, StructuredOutput
from graphrunner.sampling.sampler import Sampler
from graphrunner.sampling.structured_output import StructuredOutputCompiler, allowed_mask, forbid_others

WORDS = ["true", "false", "null", "name", "age", "yes", "no", '"a"', '": ', ", ", "cat", "catfish"]
VOCABULARY = [bytes([code]) for code in range(32, 127)] + [word.encode() for word in WORDS] + [b""]
EOS = len(VOCABULARY) - 1
WIDTH = len(VOCABULARY) + 6  # the model's vocabulary is padded
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "age": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def compiler():
    made = StructuredOutputCompiler(lambda: VOCABULARY, WIDTH, [EOS])
    yield made
    made.close()


def noise_logits(sequence) -> torch.Tensor:
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(sum(sequence) * 31 + len(sequence)))
    logits[EOS] += 3.0
    return logits


def text_of(token_ids) -> str:
    assert EOS in token_ids, "the text never ended"
    ids = token_ids[: token_ids.index(EOS)]
    assert set(token_ids[len(ids) :]) == {EOS}, "only the end may follow the end"
    return b"".join(VOCABULARY[token_id] for token_id in ids).decode()


def run(compiler, *shapes: StructuredOutput | None, num_steps: int = 60, temperature: float = 1.0):
    params = [SamplingParams(temperature=temperature, structured_output=shape) for shape in shapes]
    inits = [row_init(row, each, seed=row) for row, each in enumerate(params, start=1)]
    sampler = Sampler(WIDTH, len(inits) + 1, "cpu", compiler)
    return generate(inits, num_steps, logits_of=noise_logits, eos=frozenset({EOS}), sampler=sampler)


def test_shapes_in_one_batch(compiler):
    shapes = (
        StructuredOutput(json_schema=SCHEMA),
        StructuredOutput(regex=r"[a-c]{2}-[0-9]{3}"),
        StructuredOutput(choice=("cat", "catfish", 'say "no"')),
        StructuredOutput(grammar='root ::= "x" pair "y"\npair ::= "" | "(" pair ")"'),
    )
    outputs = run(compiler, None, *shapes)
    person = json.loads(text_of(outputs[1]))
    assert sorted(person) == ["age", "name"] and 0 <= person["age"] <= 99 and len(person["name"]) <= 4
    assert re.fullmatch(r"[a-c]{2}-[0-9]{3}", text_of(outputs[2]))
    assert text_of(outputs[3]) in ("cat", "catfish", 'say "no"')
    assert re.fullmatch(r"x(\(*)(\)*)y", text_of(outputs[4]))
    assert outputs[0] == run(None, None)[0], "a neighbour without a grammar is not touched"


def test_greedy_rows_obey_too(compiler):
    assert re.fullmatch(
        "(yes|no) cat", text_of(run(compiler, StructuredOutput(regex="(yes|no) cat"), temperature=0.0)[0])
    )


def test_empty_schema_is_any_object(compiler):
    cursor = compiler.cursor(StructuredOutput(json_schema="{}"))
    assert not cursor.advance(VOCABULARY.index(b"["))
    for token in (b"{", b"}"):
        assert cursor.advance(VOCABULARY.index(token))
    assert cursor.advance(EOS) and cursor.is_terminated and not cursor.advance(EOS)


def test_end_allows_the_end_only(compiler):
    cursor = compiler.cursor(StructuredOutput(choice=("no",)), [VOCABULARY.index(b"no")])
    for _ in range(2):
        logits = torch.zeros(1, WIDTH)
        forbid_others(logits, torch.tensor([0]), allowed_mask([cursor], WIDTH))
        assert (logits[0] == 0).nonzero()[:, 0].tolist() == [EOS]
        cursor.advance(EOS)


def test_resumed_request_stands_where_it_stood(compiler):
    shape = SamplingParams(temperature=1.0, structured_output=StructuredOutput(json_schema=SCHEMA))
    eos = frozenset({EOS})
    whole = generate(
        [row_init(1, shape, seed=5)], 40, logits_of=noise_logits, eos=eos, sampler=Sampler(WIDTH, 3, "cpu", compiler)
    )[0]
    resumed = generate(
        [row_init(2, shape, seed=5, output=whole[:6])],
        34,
        logits_of=noise_logits,
        eos=eos,
        sampler=Sampler(WIDTH, 3, "cpu", compiler),
    )[0]
    assert resumed == whole


def test_next_step_may_be_launched_before_the_last_is_read(compiler):
    sampler = Sampler(WIDTH, 2, "cpu", compiler)
    params = SamplingParams(temperature=1.0, structured_output=StructuredOutput(regex="ab{3}c"))
    handles = []
    for step in range(6):
        batch = decode_batch([1], [4 + step], [row_init(1, params)] if step == 0 else ())
        sampler.apply(batch, frozenset({EOS}))
        handles.append(sampler.sample(ModelOutput(logits=noise_logits([step])[None]), batch))
    assert text_of([handle.wait()[0] for handle in handles]) == "abbbc"


@pytest.mark.parametrize(
    "shape, field",
    [
        (StructuredOutput(json_schema="{not json"), "json_schema"),
        (StructuredOutput(json_schema='{"type": "nonsense"}'), "json_schema"),
        (StructuredOutput(json_schema='"text"'), "json_schema"),
        (StructuredOutput(regex="(a"), "regex"),
        (StructuredOutput(grammar="this is no grammar"), "grammar"),
        (StructuredOutput(grammar='start ::= "a"'), "grammar"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_shape_is_refused_by_name(compiler, shape, field):
    with pytest.raises(InvalidRequestError, match=f"structured_output.{field}") as caught:
        compiler.compile(shape).result(timeout=20)
    assert "\n" not in str(caught.value)
    assert compiler.compile(StructuredOutput(regex="a")).result(timeout=20), "the compiler goes on"


def test_compiled_once(compiler):
    shape = StructuredOutput(regex="[0-9]+")
    assert compiler.compile(shape) is compiler.compile(StructuredOutput(regex="[0-9]+"))


def test_a_refusal_says_what_is_wrong_and_nothing_of_the_library(compiler):
    with pytest.raises(InvalidRequestError, match=r"cannot be compiled: .*nope") as caught:
        compiler.compile(StructuredOutput(json_schema='{"$ref": "#/nope"}')).result()
    assert ".cc:" not in str(caught.value) and "[" not in str(caught.value).partition("compiled:")[2]
