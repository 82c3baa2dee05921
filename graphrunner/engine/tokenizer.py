"""Where the settings say that model and tokenizer are. Free of torch, so that an HTTP front can use it too."""

from __future__ import annotations

from graphrunner.config.engine_config import LoadConfig
from graphrunner.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from graphrunner.tokenizer.hf_tokenizer import tokenizer_from_hf
from graphrunner.tokenizer.tokenizer import Tokenizer
from graphrunner.weights.gguf_header import read_gguf_metadata
from graphrunner.weights.source import LoadFormat, ModelSource, resolve_source


def source_of(load: LoadConfig) -> ModelSource:
    """The model on this disk; downloads it when it is a hub id. Raises ModelLoadError."""
    return resolve_source(load.model, LoadFormat(load.load_format), is_pickle_allowed=load.allow_pickle)


def load_tokenizer(load: LoadConfig, source: ModelSource) -> Tokenizer | None:
    """The tokenizer of a model, or the one named instead; None when none is wanted. Raises ModelLoadError."""
    if load.skip_tokenizer_init:
        return None
    if load.tokenizer:
        return tokenizer_from_hf(load.tokenizer, is_remote_code_trusted=load.trust_remote_code)
    if source.path.is_file():
        return tokenizer_from_gguf(read_gguf_metadata(source.path), source.name)
    return tokenizer_from_hf(source.path, is_remote_code_trusted=load.trust_remote_code)
