"""Text of a given shape: grammars compiled once by xgrammar, a cursor for each request, a token mask for each step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.sampling_params import StructuredOutput
from graphrunner.device.transfer import to_device

if TYPE_CHECKING:
    import xgrammar

_MAX_CACHED = 256
_TOKENS_PER_WORD = 32


_PLACE_IN_THE_LIBRARY = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""A clock time and a source file, with which the library's own errors begin: nothing for whoever sent the grammar."""


class GrammarCursor:
    """Where one request stands in its grammar. Host only."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_ids: Sequence[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self._stop_ids = tuple(stop_ids)

    def advance(self, token_id: int) -> bool:
        """Take a token; False, with nothing changed, when the grammar does not allow it or has ended."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    @property
    def is_terminated(self) -> bool:
        """Whether an end token was taken."""
        return bool(self._matcher.is_terminated())

    def fill(self, mask: Tensor, index: int) -> None:
        """Write the allowed tokens as bits into row `index` of int32 [n, ceil(V / 32)], CPU. At the end: stops only."""
        if not self.is_terminated:
            self._matcher.fill_next_token_bitmask(mask, index)
            return
        mask[index] = 0
        for token_id in self._stop_ids:
            word, bit = divmod(token_id, _TOKENS_PER_WORD)
            mask[index, word] = int(mask[index, word]) | (1 << bit if bit < 31 else -(1 << 31))


class StructuredOutputCompiler:
    """Compiles shapes in a thread of its own, each text once.

    Args:
        vocabulary: called once, at the first use: the bytes of every token by id, empty for special tokens.
        vocab_size: width of the logits; ids past the vocabulary are never allowed.
        stop_ids: the ids that may end a complete text.
    """

    def __init__(self, vocabulary: Callable[[], Sequence[bytes]], vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._stop_ids = tuple(sorted(stop_ids))
        self._futures: dict[StructuredOutput, Future[xgrammar.CompiledGrammar]] = {}
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graphrunner-grammar")
        self._lock = Lock()

    def compile(self, shape: StructuredOutput) -> Future[xgrammar.CompiledGrammar]:
        """Begin to compile, or find what was compiled. Thread-safe.

        Raises (from the future):
            InvalidRequestError: names structured_output and what is wrong with it.
        """
        with self._lock:
            future = self._futures.get(shape)
            if future is None:
                while len(self._futures) >= _MAX_CACHED:
                    del self._futures[next(iter(self._futures))]
                future = self._futures[shape] = self._thread.submit(self._compile, shape)
            return future

    def cursor(self, shape: StructuredOutput, token_ids: Sequence[int] = ()) -> GrammarCursor:
        """A cursor that has taken `token_ids` already. Blocks until the shape is compiled; raises as `compile`."""
        cursor = GrammarCursor(self.compile(shape).result(), self._stop_ids)
        for token_id in token_ids:
            cursor.advance(token_id)
        return cursor

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, shape: StructuredOutput) -> xgrammar.CompiledGrammar:
        field, text = _field_of(shape)
        try:
            return self._compile_text(shape)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cause = _PLACE_IN_THE_LIBRARY.sub("", lines[-1])
            raise InvalidRequestError(f"structured_output.{field}", text, f"cannot be compiled: {cause}") from None

    def _compile_text(self, shape: StructuredOutput) -> xgrammar.CompiledGrammar:
        compiler = self._compiler_of_vocabulary()
        if shape.json_schema is not None:
            schema = json.loads(shape.json_schema)
            text = json.dumps(schema) if schema != {} else '{"type": "object"}'
            # Free whitespace would let a model that has nothing to say pad forever.
            return compiler.compile_json_schema(text, any_whitespace=False)
        if shape.regex is not None:
            return compiler.compile_regex(shape.regex)
        if shape.grammar is not None:
            return compiler.compile_grammar(shape.grammar)
        return compiler.compile_grammar(
            "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in shape.choice or ())
        )

    def _compiler_of_vocabulary(self) -> xgrammar.GrammarCompiler:
        if self._compiler is None:
            import xgrammar

            info = xgrammar.TokenizerInfo(
                list(self._vocabulary())[: self._vocab_size],
                xgrammar.VocabType.RAW,
                vocab_size=self._vocab_size,
                stop_token_ids=list(self._stop_ids),
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._compiler


def allowed_mask(cursors: Sequence[GrammarCursor], vocab_size: int) -> Tensor:
    """int32 [n, ceil(V / 32)], CPU: bit b of word w is set when token 32 * w + b may come next."""
    mask = torch.full((len(cursors), -(-vocab_size // _TOKENS_PER_WORD)), -1, dtype=torch.int32)
    for index, cursor in enumerate(cursors):
        cursor.fill(mask, index)
    return mask


def forbid_others(logits: Tensor, indices: Tensor, mask: Tensor) -> None:
    """Set what `mask` does not allow to minus infinity, in place. Sync: none.

    Args:
        logits: fp32 [R, V], device.
        indices: int64 [n], device; the rows of `logits` that the rows of `mask` are about.
        mask: int32 [n, ceil(V / 32)], CPU.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    words = to_device(mask, logits.device)[:, token_ids // _TOKENS_PER_WORD]
    is_allowed = ((words >> (token_ids % _TOKENS_PER_WORD)) & 1).bool()
    logits.index_copy_(0, indices, torch.where(is_allowed, logits[indices], -torch.inf))


def _field_of(shape: StructuredOutput) -> tuple[str, object]:
    for field in ("json_schema", "regex", "grammar"):
        text = getattr(shape, field)
        if text is not None:
            return field, text
    return "choice", shape.choice
