"""An engine core that follows a script, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import EngineStateError, InvalidRequestError
from graphrunner.core.outputs import EngineOutput, TokenLogprobs
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.sequence_ids import sequence_ids
from graphrunner.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 260
EOS = 256
BOS = 257
MAX_MODEL_LEN = 64


class ByteTokenizer(Tokenizer):
    """Token id = byte; 256 ends a text and 257 starts one."""

    def __init__(self) -> None:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        fast = FastTokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(name, special=True) for name in ("<eos>", "<bos>")])
        super().__init__(fast, special_ids=frozenset({EOS, BOS}), eos_token_ids=(EOS,), bos_token_id=BOS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        text = "".join(str(message["content"]) for message in messages)
        if "no template" in text:
            raise RuntimeError("/secret/path of the template")
        return [BOS, *self.encode(text)] if add_generation_prompt else self.encode(text)


@dataclass
class _Live:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    num_done: int = 0
    ended: set[str] = field(default_factory=set)
    pooling: Pooling | None = None

    @property
    def text(self) -> str:
        return bytes(i for i in self.prompt if i < 256).decode("utf-8", "replace")

    @property
    def open_ids(self) -> list[str]:
        return [each for each in sequence_ids(self.request_id, self.params.n) if each not in self.ended]


class FakeEngine:
    """Says `script` to every prompt, one byte a step, then the end token; limits work.

    A bias of +100 on a token makes it the only one. A prompt with "slow" in it takes 20 ms a step.
    """

    model_name = "/models/secret-place/fake-model"
    max_model_len = MAX_MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, script: str = "Hello, world!") -> None:
        self.script = script
        self.live: dict[str, _Live] = {}
        self.aborted: list[str] = []
        self.num_added = 0
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.break_next_step = False
        self.is_closed = False
        self.is_asleep = False
        self.level = 0  # of the last sleep
        self.wake_error: Exception | None = None
        self.short_choices: set[int] = set()  # output indices that end after one token

    def sleep(self, level: int) -> None:
        if self.live:
            raise EngineStateError(f"cannot sleep while {len(self.live)} requests run")
        if not self.is_asleep:
            self.is_asleep, self.level = True, level

    def wake(self) -> None:
        if self.wake_error is not None:
            raise self.wake_error
        self.is_asleep = False

    def prepare(self, params: SamplingParams) -> Future[object] | None:
        """A grammar takes a moment; one with "$ref" in it turns out to be wrong when the request is added."""
        if params.structured_output is None:
            return None
        compiled: Future[object] = Future()
        threading.Timer(0.05, compiled.set_result, [None]).start()
        return compiled

    def add_request(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, *, priority: int
    ) -> None:
        assert request_id not in self.live
        if self.is_asleep:
            raise EngineStateError("the engine is asleep: wake it first")
        if bytes(i for i in token_ids if i < 256) == b"refuse me":
            raise InvalidRequestError("prompt", "refuse me", "is refused")
        if params.structured_output is not None and "$ref" in (params.structured_output.json_schema or ""):
            raise InvalidRequestError("structured_output.json_schema", "...", "cannot be compiled")
        room = self.max_model_len - len(token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        self.live[request_id] = _Live(request_id, token_ids, params, limit)
        self.num_added += 1
        self.params.append(params)
        self.priorities.append(priority)

    def add_embedding_request(
        self, request_id: str, token_ids: tuple[int, ...], pooling: Pooling, *, priority: int
    ) -> None:
        """The vector of a prompt is its length and 3 (mean) or 4 (last); that of "nothing" is lost."""
        self.live[request_id] = _Live(request_id, token_ids, SamplingParams(), 1, pooling=pooling)
        self.priorities.append(priority)

    def finish(self, sequences: Sequence[str], reason: FinishReason) -> bool:
        was_live = False
        for sequence in sequences:
            live = self.live.get(sequence.partition("#")[0])
            if live is not None and sequence not in live.ended:
                was_live = True
                live.ended.add(sequence)
                if not live.open_ids:
                    del self.live[live.request_id]
                    if reason is FinishReason.ABORT:
                        self.aborted.append(live.request_id)
        return was_live

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def stats_since(self, step_id: int) -> EngineStats:
        return EngineStats(num_running=len(self.live))

    def close(self) -> None:
        self.is_closed = True

    def step(self) -> list[EngineOutput]:
        if self.break_next_step:
            raise RuntimeError("the device is gone: /secret/path")
        if any("slow" in live.text for live in self.live.values()):
            time.sleep(0.02)
        outputs = [output for live in self.live.values() for output in self._advance(live)]
        self.live = {name: live for name, live in self.live.items() if live.open_ids}
        return outputs

    def _advance(self, live: _Live) -> list[EngineOutput]:
        if live.pooling is not None:
            live.ended.add(live.request_id)
            if live.text == "nothing":
                return [EngineOutput(live.request_id, finish_reason=FinishReason.ERROR, error="lost")]
            vector = (float(len(live.prompt)), 3.0 if live.pooling is Pooling.MEAN else 4.0)
            return [EngineOutput(live.request_id, finish_reason=FinishReason.STOP, embedding=vector)]
        token = self._token(live)
        live.num_done += 1
        scored: tuple[TokenLogprobs, ...] | None = None
        if live.num_done == 1 and live.params.prompt_logprobs is not None:
            scored = tuple(self._logprob(each, live.params.prompt_logprobs) for each in live.prompt[1:])
        outputs = []
        for name in live.open_ids:
            reason, stop_reason = self._reason(live, token, int(name.partition("#")[2] or 0))
            if reason is not None:
                live.ended.add(name)
            outputs.append(
                EngineOutput(
                    name,
                    (token,),
                    logprobs=None if live.params.logprobs is None else (self._logprob(token, live.params.logprobs),),
                    prompt_logprobs=scored,
                    prompt_logprobs_start=1,
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    num_cached_tokens=len(live.prompt) - 1,
                )
            )
        return outputs

    def _token(self, live: _Live) -> int:
        bias = live.params.logit_bias or {}
        forced = [token for token, value in bias.items() if value == 100]
        if forced:
            return forced[0]
        script = self.script.encode()
        is_over = live.num_done >= len(script)
        if is_over and (live.params.ignore_eos or live.num_done < live.params.min_tokens):
            return script[live.num_done % len(script)]
        return EOS if is_over else script[live.num_done]

    def _reason(self, live: _Live, token: int, index: int) -> tuple[FinishReason | None, int | None]:
        if token == EOS and not live.params.ignore_eos:
            return FinishReason.STOP, None
        if token in (live.params.stop_token_ids or ()):
            return FinishReason.STOP, token
        if live.num_done >= live.limit or index in self.short_choices:
            return FinishReason.LENGTH, None
        return None, None

    def _logprob(self, token: int, num_top: int) -> TokenLogprobs:
        """The token is sure; every other one has no chance at all, as under top_k 1."""
        others = [other for other in range(97, 97 + num_top + 1) if other != token][: max(num_top - 1, 0)]
        top = ((token, 0.0), *((other, -math.inf) for other in others))[:num_top]
        return TokenLogprobs(token, 0.0, 1, top)
