"""Structured logs and spans of real requests, against a collector on loopback."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from loopback import start_server
from scripted_engine import FakeEngine

from graphrunner.config.engine_config import LogFormat
from graphrunner.core.errors import ConfigError
from graphrunner.entrypoints.openai.server_options import ServerOptions
from graphrunner.entrypoints.openai.tracing import otlp_tracer
from graphrunner.telemetry.log import adopt_logger, announce, setup_logging


@pytest.fixture
def json_log(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """A function that returns the log of the package, as JSON lines; text again afterwards."""
    setup_logging("info", LogFormat.JSON)
    yield lambda: capsys.readouterr().err
    setup_logging()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A place that takes spans: its URL, and what came."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}/v1/traces", bodies
    listener.shutdown()
    listener.server_close()


def test_json_lines_name_the_request(json_log: Callable[[], str]) -> None:
    server = start_server(FakeEngine)
    try:
        with server.http() as http:
            http.post("/v1/completions", json={"prompt": "top secret"}, headers={"X-Request-Id": "mine-1"})
            http.post("/v1/completions", json={"prompt": "x", "nope": 1})
            http.get("/health")
    finally:
        server.stop()
    text = json_log()
    lines = [json.loads(line) for line in text.splitlines()]
    access = [line for line in lines if line["logger"] == "graphrunner.access"]
    assert [line["status"] for line in access] == [200, 400], "what machines ask for all the time is not logged"
    assert access[0]["request_id"] == "mine-1" and access[0]["route"] == "/v1/completions"
    assert access[0]["method"] == "POST" and access[0]["duration_ms"] > 0 and access[0]["level"] == "info"
    assert access[0]["time"].endswith("+00:00") and "secret" not in text


def test_an_exception_is_one_line(json_log: Callable[[], str]) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("graphrunner.x").exception("it failed")
    (line,) = json_log().splitlines()
    parsed = json.loads(line)
    assert parsed["message"] == "it failed" and "ValueError: two\nlines" in parsed["exception"]


def test_what_is_announced_is_a_line_too(json_log: Callable[[], str]) -> None:
    announce("ready")
    adopt_logger("somebody")
    logging.getLogger("somebody").warning("odd")
    first, second = map(json.loads, json_log().splitlines())
    assert (first["message"], second["message"], second["logger"]) == ("ready", "odd", "somebody")


def test_a_span_for_each_request(collector: tuple[str, list[bytes]]) -> None:
    """With the caller's trace as parent; nothing for probes, nothing of the prompt; sent before the server is gone."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, bodies = collector
    server = start_server(FakeEngine, ServerOptions(port=0, otlp_endpoint=url))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    try:
        with server.http() as http:
            headers = {"traceparent": parent, "X-Request-Id": "mine-2"}
            http.post("/v1/completions", json={"prompt": "top secret", "stream": True}, headers=headers)
            http.post("/v1/completions", json={"prompt": ""})
            http.get("/metrics")
    finally:
        server.stop()
    sent = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    groups = [group for each in sent for resource in each.resource_spans for group in resource.scope_spans]
    spans = sorted((span for group in groups for span in group.spans), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in spans] == ["POST /v1/completions"] * 2 and b"secret" not in b"".join(bodies)
    first, second = ({item.key: item.value for item in span.attributes} for span in spans)
    assert spans[0].trace_id.hex() == parent.split("-")[1] and spans[0].parent_span_id.hex() == parent.split("-")[2]
    assert first["http.response.status_code"].int_value == 200 and second["http.response.status_code"].int_value == 400
    assert first["graphrunner.request_id"].string_value == "mine-2"
    assert first["gen_ai.request.model"].string_value == "fake-model"
    assert first["gen_ai.usage.input_tokens"].int_value == len("top secret")
    assert [event.name for event in spans[0].events] == ["first byte of the answer"]
    assert spans[0].end_time_unix_nano > spans[0].start_time_unix_nano and spans[1].trace_id != spans[0].trace_id


def test_a_wrong_endpoint_is_told() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint='localhost:4318'"):
        otlp_tracer("localhost:4318")
