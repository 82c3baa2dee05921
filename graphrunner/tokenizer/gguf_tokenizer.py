"""A tokenizer from GGUF metadata, built directly: the vocabulary, merges and template are all in the file.

Two families: "gpt2", byte-level BPE whose text splitting is named by `tokenizer.ggml.pre`; "llama", sentencepiece
BPE given as scored pieces.
Source: the splitting expressions are those of the models' own tokenizer.json files, as listed in llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from graphrunner.core.errors import ModelLoadError
from graphrunner.tokenizer.chat_template import ChatTemplate
from graphrunner.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_SPACE_MARK = "\u2581"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _WORDS % "{1,3}"
_QWEN2_WORDS = _WORDS % ""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_BY_PRE = {
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "dbrx": _LLAMA3_WORDS,
    "smaug-bpe": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
    "stablelm2": _QWEN2_WORDS,
    "tekken": _TEKKEN_WORDS,
}
_SINGLE_DIGITS_PRE = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_GPT2_PRE = frozenset({"default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jina-v2-de", "roberta-bpe"})
_NFC_PRE = frozenset({"qwen2", "deepseek-r1-qwen"})
_BOS_BY_DEFAULT_PRE = frozenset({"llama-bpe", "llama3", "llama-v3"})


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, object], name: str = "GGUF") -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's key-value pairs.
        name: of the file, for messages.

    Raises:
        ModelLoadError: no tokenizer in the file, or a kind that is not supported.
    """
    tokens = _list(metadata, "tokenizer.ggml.tokens", name)
    kind = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    if kind == "gpt2":
        fast = _byte_level_bpe(tokens, _list(metadata, "tokenizer.ggml.merges", name), pre, name)
        has_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT_PRE))
    elif kind == "llama":
        scores = _list(metadata, "tokenizer.ggml.scores", name)
        has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        fast = _sentencepiece_bpe(tokens, scores, has_prefix, _token_id(metadata, "unknown"))
        has_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", True))
    else:
        raise ModelLoadError(f"{name}: tokenizer.ggml.model={kind!r} is not supported (supported: gpt2, llama)")
    special_ids = _add_special_tokens(fast, tokens, metadata)
    bos, eos = _token_id(metadata, "bos"), _token_id(metadata, "eos")
    has_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _frame(fast, tokens, bos if has_bos else None, eos if has_eos else None)
    ends = dict.fromkeys(one for one in (eos, _token_id(metadata, "eot")) if one is not None)
    return Tokenizer(
        fast,
        special_ids=special_ids,
        eos_token_ids=tuple(ends),
        bos_token_id=bos,
        chat_template=_chat_template(metadata, tokens),
    )


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], pre: str, name: str) -> FastTokenizer:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ranks_whole_words = pre in _BOS_BY_DEFAULT_PRE or pre == "tekken"
    vocabulary = {token: i for i, token in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ranks_whole_words))
    if pre in _WORDS_BY_PRE:
        words = pre_tokenizers.Split(Regex(_WORDS_BY_PRE[pre]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    elif pre in _SINGLE_DIGITS_PRE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        fast.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in _GPT2_PRE:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join(sorted({*_WORDS_BY_PRE, *_SINGLE_DIGITS_PRE, *_GPT2_PRE}))
        raise ModelLoadError(f"{name}: tokenizer.ggml.pre={pre!r} is not supported (supported: {known})")
    if pre in _NFC_PRE:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], has_prefix: bool, unknown_id: int | None
) -> FastTokenizer:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, normalizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_of(tokens, scores, vocabulary),
        unk_token=tokens[unknown_id] if unknown_id is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    fast = FastTokenizer(model)
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    fast.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces]) if has_prefix else mark_spaces
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return fast


def _merges_of(tokens: Sequence[str], scores: Sequence[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first: the merge list that scored pieces stand for."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(tokens, scores, strict=False):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort(key=lambda one: one[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(fast: FastTokenizer, tokens: Sequence[str], metadata: Mapping[str, object]) -> frozenset[int]:
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, list) else []
    control = [i for i, one in enumerate(types) if one == _TokenType.CONTROL]
    unknown = [i for i, one in enumerate(types) if one == _TokenType.UNKNOWN]
    user_defined = [i for i, one in enumerate(types) if one == _TokenType.USER_DEFINED]
    fast.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in [*unknown, *control]])
    fast.add_tokens([AddedToken(tokens[i], normalized=False) for i in user_defined])
    return frozenset([*unknown, *control])


def _frame(fast: FastTokenizer, tokens: Sequence[str], bos: int | None, eos: int | None) -> None:
    from tokenizers import processors

    if bos is None and eos is None:
        return
    first = [f"{tokens[bos]}:0"] if bos is not None else []
    last = [f"{tokens[eos]}:0"] if eos is not None else []
    fast.post_processor = processors.TemplateProcessing(
        single=[*first, "$A:0", *last],
        pair=[*first, "$A:0", *last, *(one[:-1] + "1" for one in first), "$B:1", *(one[:-1] + "1" for one in last)],
        special_tokens=[(tokens[i], i) for i in (bos, eos) if i is not None],
    )


def _chat_template(metadata: Mapping[str, object], tokens: Sequence[str]) -> ChatTemplate:
    key = "tokenizer.chat_template"
    templates = {}
    for name, value in metadata.items():
        if name == key:
            templates["default"] = str(value)
        elif name.startswith(f"{key}."):
            templates[name.removeprefix(f"{key}.")] = str(value)
    special = {}
    for field, gguf_name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, gguf_name)
        if token_id is not None and token_id < len(tokens):
            special[f"{field}_token"] = tokens[token_id]
    return ChatTemplate(templates, special)


def _token_id(metadata: Mapping[str, object], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def _list(metadata: Mapping[str, object], key: str, name: str) -> list:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ModelLoadError(f"{name}: has no {key}; name a tokenizer, or skip it (skip_tokenizer_init)")
    return value
