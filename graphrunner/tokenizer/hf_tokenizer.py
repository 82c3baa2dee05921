"""A tokenizer from a Hugging Face folder or hub id, read by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graphrunner.core.errors import ModelLoadError
from graphrunner.tokenizer.chat_template import ChatTemplate
from graphrunner.tokenizer.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def tokenizer_from_hf(name: str | Path, *, is_remote_code_trusted: bool = False) -> Tokenizer:
    """Load a tokenizer from a folder, or from the hub when there is no such folder.

    Raises:
        ModelLoadError: nothing there that transformers can read as a tokenizer.
    """
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir()
    try:
        hf = AutoTokenizer.from_pretrained(
            str(name), trust_remote_code=is_remote_code_trusted, local_files_only=is_local
        )
    except Exception as error:  # transformers raises many kinds here; each means that there is no usable tokenizer
        first_line = str(error).strip().partition("\n")[0][:160] or type(error).__name__
        raise ModelLoadError(f"{name}: no usable tokenizer (skip_tokenizer_init runs without): {first_line}") from error
    special_tokens = {key: str(value) for key in _SPECIAL_NAMES if (value := getattr(hf, key, None)) is not None}
    templates = hf.chat_template
    if not isinstance(templates, Mapping):
        templates = {"default": str(templates)} if templates else {}
    fast = getattr(hf, "backend_tokenizer", None)
    if fast is not None:
        fast.no_truncation()
        fast.no_padding()
    return Tokenizer(
        fast,
        slow=None if fast is not None else hf,
        special_ids=_special_ids(hf, fast),
        eos_token_ids=(hf.eos_token_id,) if hf.eos_token_id is not None else (),
        bos_token_id=hf.bos_token_id,
        chat_template=ChatTemplate(templates, special_tokens),
    )


def _special_ids(hf: object, fast: object) -> frozenset[int]:
    ids = set(getattr(hf, "all_special_ids", ()))
    if fast is not None:
        ids = {i for i, added in fast.get_added_tokens_decoder().items() if added.special}  # type: ignore[attr-defined]
    return frozenset(ids)
