"""Small vocabularies of each kind, built from GGUF-like metadata so that the builder is tested on the way."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from graphrunner.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from graphrunner.tokenizer.tokenizer import Tokenizer

SPACE_MARK = "\u2581"


def byte_level_metadata(pre: str = "smollm") -> dict[str, object]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "\u0120 the", "e a", "s ea", "\u0120 sea"]
    tokens = ["<|start|>", "<|end|>", *alphabet, *(merge.replace(" ", "") for merge in merges), "<|a tool|>"]
    types = [3, 3, *[1] * (len(alphabet) + len(merges)), 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}",
    }


def sentencepiece_metadata(has_prefix: bool = True) -> dict[str, object]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = [
        SPACE_MARK,
        *"abcdefghijklmnopqrstuvwxyz",
        "th",
        "the",
        f"{SPACE_MARK}the",
        "ea",
        "sea",
        f"{SPACE_MARK}sea",
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": types + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


@cache
def byte_level() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata())


@cache
def sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata())


@cache
def opaque() -> Tokenizer:
    """Pieces joined by the word-piece rules: a decoder that does more than joining bytes."""
    words = ["[UNK]", "the", "sea", "and", "land", "##s", "##ing", ".", ","]
    fast = FastTokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return Tokenizer(fast)
