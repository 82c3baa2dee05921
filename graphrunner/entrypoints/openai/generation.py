"""The streams of one HTTP request: admitted together, read together, closed together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from graphrunner.core.outputs import RequestOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.admission import Ticket
from graphrunner.entrypoints.openai.engine_client import EngineClient, OutputStream
from graphrunner.entrypoints.openai.errors import ApiError
from graphrunner.entrypoints.openai.front_metrics import FrontMetrics
from graphrunner.entrypoints.openai.responses import PromptTokensDetails, Usage

_FAILED = frozenset({"error", "abort"})


@dataclass(slots=True)
class UsageCount:
    """Tokens of a request, counted as its outputs come."""

    prompt_lens: Sequence[int]
    num_completion_tokens: int = 0
    cached_lens: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count one delta."""
        self.num_completion_tokens += sum(len(each.token_ids) for each in output.outputs)
        cached_len = min(output.num_cached_tokens, self.prompt_lens[prompt_index])
        self.cached_lens[prompt_index] = max(self.cached_lens.get(prompt_index, 0), cached_len)

    def usage(self) -> Usage:
        """As OpenAI writes it: a prompt counts once, however many outputs it has."""
        num_prompt_tokens = sum(self.prompt_lens)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.cached_lens.values())),
        )


class Generation:
    """Streams that belong to one HTTP request.

    Args:
        ticket: their room in the server; released by `aclose`.
        timeout_s: from now; then the outputs end with 504.
    """

    def __init__(self, ticket: Ticket, metrics: FrontMetrics, timeout_s: float) -> None:
        self._ticket = ticket
        self._metrics = metrics
        self._streams: list[OutputStream] = []
        self._start_s = time.perf_counter()
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    async def start(
        self,
        client: EngineClient,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        priority: int,
    ) -> None:
        """Admit every prompt; when one is refused none stays. Raises as `EngineClient.generate`."""
        for index, token_ids in enumerate(prompts):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            self._streams.append(await client.generate(name, token_ids, params, priority))

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, delta) as they come.

        Raises:
            ApiError: 504 out of time, 500 the engine gave a request up.
        """
        last_s: dict[tuple[int, int], float] = {}
        finished: set[tuple[int, int]] = set()
        outputs = self._merged() if len(self._streams) > 1 else self._single()
        try:
            while (item := await self._next(outputs)) is not None:
                prompt_index, output = item
                # The engine shows an output that has ended again for as long as its siblings run.
                output.outputs = [each for each in output.outputs if (prompt_index, each.index) not in finished]
                finished |= {(prompt_index, each.index) for each in output.outputs if each.finish_reason is not None}
                self._observe(prompt_index, output, last_s)
                yield item
        finally:
            await outputs.aclose()
        self._metrics.e2e_s.observe(time.perf_counter() - self._start_s)

    async def aclose(self) -> None:
        """Abort what still runs and leave. Idempotent."""
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()
        self._ticket.release()

    async def _next(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> tuple[int, RequestOutput] | None:
        """The next output before the deadline; None at the end."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await anext(outputs, None)
        except TimeoutError:
            raise ApiError(HTTPStatus.GATEWAY_TIMEOUT, "the request took too long", code="timeout") from None

    def _observe(self, prompt_index: int, output: RequestOutput, last_s: dict[tuple[int, int], float]) -> None:
        """Measure the gaps between deltas, and notice a request that failed."""
        now_s = time.perf_counter()
        for each in output.outputs:
            key = (prompt_index, each.index)
            if each.token_ids:
                before_s = last_s.get(key)
                if before_s is None:
                    self._metrics.ttft_s.observe(now_s - self._start_s)
                else:
                    self._metrics.itl_s.observe((now_s - before_s) / len(each.token_ids))
                last_s[key] = now_s
                self._metrics.output_tokens.inc(len(each.token_ids))
            if each.finish_reason in _FAILED:
                raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine could not complete this request")

    async def _single(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async for output in self._streams[0]:
            yield 0, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """All streams at once, in the order of arrival."""
        arrived: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

        async def read(index: int, stream: OutputStream) -> None:
            try:
                async for output in stream:
                    arrived.put_nowait((index, output))
            except Exception as error:
                arrived.put_nowait((index, error))
            arrived.put_nowait((index, None))

        readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(self._streams)]
        num_open = len(readers)
        try:
            while num_open:
                index, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


def new_request_id(prefix: str) -> str:
    """chatcmpl-..., cmpl-...: never taken from the client, so always unique."""
    return f"{prefix}-{uuid.uuid4().hex}"
