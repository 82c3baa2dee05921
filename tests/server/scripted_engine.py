"""An engine that follows a script, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import CompletionOutput, Logprob, RequestOutput
from graphrunner.core.pooling import Pooling
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.output_processor import RequestOutputKind
from graphrunner.tokenizer.stop import StopMatcher

VOCAB_SIZE = 260
EOS = 256
BOS = 257
MAX_MODEL_LEN = 64


class ByteTokenizer:
    """Token id = byte; 256 ends a text and 257 starts one."""

    eos_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

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


class FakeMetrics:
    def text(self, stats: EngineStats | None = None) -> bytes:
        return (
            b"# HELP graphrunner_steps_total Steps\n# TYPE graphrunner_steps_total counter\ngraphrunner_steps_total 1\n"
        )


@dataclass
class _Live:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    num_done: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    matchers: dict[int, StopMatcher] = field(default_factory=dict)
    pooling: Pooling | None = None


class FakeEngine:
    """Says `script` to every prompt, one byte a step, then the end token; stops and limits work.

    A bias of +100 on a token makes it the only one. A prompt with "slow" in it takes 20 ms a step.
    """

    model_name = "/models/secret-place/fake-model"
    max_model_len = MAX_MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, script: str = "Hello, world!") -> None:
        self.script = script
        self.tokenizer = ByteTokenizer()
        self.metrics = FakeMetrics()
        self.live: dict[str, _Live] = {}
        self.aborted: list[str] = []
        self.num_added = 0
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.break_next_step = False
        self.is_closed = False
        self.short_choices: set[int] = set()  # output indices that end after one token

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        priority: int,
        output_kind: RequestOutputKind,
    ) -> None:
        assert output_kind is RequestOutputKind.DELTA
        assert request_id not in self.live
        if bytes(i for i in prompt if i < 256) == b"refuse me":
            raise InvalidRequestError("prompt", "refuse me", "is refused")
        room = self.max_model_len - len(prompt)
        limit = room if sampling_params.max_tokens is None else min(room, sampling_params.max_tokens)
        self.live[request_id] = _Live(request_id, list(prompt), sampling_params, limit)
        self.num_added += 1
        self.params.append(sampling_params)
        self.priorities.append(priority)

    def abort_request(self, request_id: str) -> bool:
        is_live = self.live.pop(request_id, None) is not None
        if is_live:
            self.aborted.append(request_id)
        return is_live

    def add_embedding_request(self, request_id: str, prompt: Sequence[int], pooling: Pooling, *, priority: int) -> None:
        """The vector of a prompt is its length and 3 (mean) or 4 (last); that of "nothing" is lost."""
        self.live[request_id] = _Live(request_id, list(prompt), SamplingParams(), 1, pooling=pooling)
        self.priorities.append(priority)

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.live))

    def close(self) -> None:
        self.is_closed = True

    def step(self) -> list[RequestOutput]:
        if self.break_next_step:
            raise RuntimeError("the device is gone: /secret/path")
        if any("slow" in self.tokenizer.decode(live.prompt) for live in self.live.values()):
            time.sleep(0.02)
        outputs = [self._advance(live) for live in list(self.live.values())]
        for output in outputs:
            if output.finished:
                del self.live[output.request_id]
        return outputs

    def _advance(self, live: _Live) -> RequestOutput:
        if live.pooling is not None:
            is_lost = self.tokenizer.decode(live.prompt) == "nothing"
            vector = (float(len(live.prompt)), 3.0 if live.pooling is Pooling.MEAN else 4.0)
            ended = CompletionOutput(0, finish_reason="error" if is_lost else "stop", stop_reason="lost")
            return RequestOutput(
                live.request_id, None, live.prompt, [ended], finished=True, embedding=None if is_lost else vector
            )
        token = self._token(live)
        live.num_done += 1
        choices = [self._choice(live, index, token) for index in range(live.params.n)]
        prompt_logprobs = None
        if live.num_done == 1 and live.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._logprob(each, live.params.prompt_logprobs) for each in live.prompt[1:])]
        return RequestOutput(
            request_id=live.request_id,
            prompt=None,
            prompt_token_ids=live.prompt,
            outputs=choices,
            finished=len(live.ended) == live.params.n,
            num_cached_tokens=len(live.prompt) - 1,
            prompt_logprobs=prompt_logprobs,
        )

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

    def _choice(self, live: _Live, index: int, token: int) -> CompletionOutput:
        ended = live.ended.get(index)
        if ended is not None:  # shown again, as the real engine does
            return CompletionOutput(index=index, finish_reason=ended)
        text = "" if token >= 256 else chr(token)
        reason: str | None = None
        stop_reason: int | str | None = None
        if (token == EOS and not live.params.ignore_eos) or index in self.short_choices:
            reason = "stop"
        elif token in (live.params.stop_token_ids or ()):
            reason, stop_reason, text = "stop", token, ""
        elif live.num_done >= live.limit:
            reason = "length"
        if live.params.stop_strings:
            matcher = live.matchers.setdefault(index, StopMatcher(live.params.stop_strings, False))
            found = matcher.append(text)
            text = found.text
            if found.stop is not None:
                reason, stop_reason = "stop", found.stop
            elif reason is not None:
                text += matcher.finish()
        if reason is not None:
            live.ended[index] = reason
        logprobs = None if live.params.logprobs is None else [self._logprob(token, live.params.logprobs)]
        return CompletionOutput(
            index=index, text=text, token_ids=[token], logprobs=logprobs, finish_reason=reason, stop_reason=stop_reason
        )

    def _logprob(self, token: int, num_top: int) -> dict[int, Logprob]:
        """The token is sure; every other one has no chance at all, as under top_k 1."""
        others = [other for other in range(97, 97 + num_top + 1) if other != token][: max(num_top - 1, 0)]
        entries = {token: Logprob(0.0, 1, chr(token) if token < 256 else "")}
        entries |= {other: Logprob(-math.inf, 2 + rank, chr(other)) for rank, other in enumerate(others)}
        return entries
