"""What every route needs, made once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.admission import Admission
from graphrunner.entrypoints.openai.body import read_model
from graphrunner.entrypoints.openai.engine_client import EngineClient, HealthState
from graphrunner.entrypoints.openai.errors import ApiError, unavailable
from graphrunner.entrypoints.openai.front_metrics import FrontMetrics
from graphrunner.entrypoints.openai.generation import Generation
from graphrunner.entrypoints.openai.prompts import PromptEncoder
from graphrunner.entrypoints.openai.response_store import ResponseStore
from graphrunner.entrypoints.openai.server_options import MIB, ServerOptions
from graphrunner.entrypoints.openai.tracing import Tracer, annotate, otlp_tracer

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Server:
    """The parts behind the routes."""

    client: EngineClient
    options: ServerOptions
    encoder: PromptEncoder
    admission: Admission
    metrics: FrontMetrics
    stored_responses: ResponseStore
    tracer: Tracer | None
    start_s: int

    @property
    def model_name(self) -> str:
        """The model's name in the API. Without one given: the last part of its path, so that no path is shown."""
        name = self.options.served_model_name or self.client.model_name.rstrip("/").rpartition("/")[2]
        return name or "model"

    @property
    def state_name(self) -> str:
        """What /health and the page say: a state of the engine, or "asleep" for one that is ready but for that."""
        state = self.client.health().state
        return "asleep" if state is HealthState.READY and self.client.is_asleep else state.value

    async def read(self, request: Request, kind: type[Model]) -> Model:
        """The checked body of a request."""
        return await read_model(request, kind, self.options.max_body_bytes, self.options.body_timeout_s)

    def check_ready(self) -> None:
        """Raises ApiError 503 unless the engine takes requests."""
        state = self.client.health().state
        if state is not HealthState.READY:
            raise unavailable(f"the engine is {state.value}")

    def check_model(self, wanted: str | None) -> None:
        """Raises ApiError 404 for a model that is not the one served."""
        if wanted is not None and wanted != self.model_name:
            message = f"the model {wanted[:80]!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    async def start_generation(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        priority: int,
        field: str,
        *,
        is_streamed: bool,
    ) -> Generation:
        """Check the prompts against the context, take room, and admit them."""
        annotate(
            gen_ai__request__model=self.model_name,
            gen_ai__usage__input_tokens=sum(map(len, prompts)),
            gen_ai__request__choice__count=params.n,
        )
        for token_ids in prompts:
            self.encoder.check_room(token_ids, params, field)
        ticket = self.admission.enter(len(prompts) * params.n, self.client.health(), "n" if params.n > 1 else field)
        generation = Generation(ticket, self.metrics, self.options.request_timeout_s)
        try:
            await generation.start(self.client, request_id, prompts, params, priority, is_streamed=is_streamed)
        except BaseException:
            await generation.aclose()
            raise
        return generation


def make_server(client: EngineClient, options: ServerOptions) -> Server:
    """Put the parts together. On the event loop. Raises ConfigError when spans cannot be sent."""
    admission = Admission(options.max_concurrent_requests)
    metrics = FrontMetrics()
    metrics.sequences.set_function(lambda: admission.num_sequences)
    store = ResponseStore(options.max_response_store_mib * MIB)
    tracer = None if options.otlp_endpoint is None else otlp_tracer(options.otlp_endpoint)
    return Server(client, options, PromptEncoder(client), admission, metrics, store, tracer, int(time.time()))
