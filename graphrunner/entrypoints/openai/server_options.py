"""Settings of the HTTP front. A field's help text stands under it; the command line prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import get_type_hints

from graphrunner.core.errors import ConfigError

MIB = 1 << 20


class ReasoningFormat(Enum):
    """Whether text in <think> tags is reasoning."""

    AUTO = "auto"
    NONE = "none"


class ToolCallFormat(Enum):
    """How the model writes tool calls."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA = "llama"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Raises ConfigError for a value that cannot be."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    served_model_name: str | None = None
    """Name of the model in the API; None takes the last part of the model's path or hub id."""
    api_key: tuple[str, ...] = ()
    """Key that clients must send as a bearer token; may be given several times."""
    api_key_file: Path | None = None
    """File with one key a line."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose pages may call the API from a browser; may be given several times."""
    max_body_mib: int = 8
    """Largest request body, MiB; larger ones get 413."""
    max_concurrent_requests: int = 2048
    """Most sequences in the server at once, running and waiting; the next request gets 429."""
    request_timeout_s: float = 600.0
    """A request that takes longer is stopped and gets 504."""
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive gets 408; a connection without a whole head of a request is closed."""
    drain_timeout_s: float = 60.0
    """After SIGTERM: how long running requests may go on."""
    max_response_store_mib: int = 64
    """Most MiB of /v1/responses kept in memory for previous_response_id; the oldest go first, 0 keeps none."""
    allow_sleep: bool = False
    """Let clients give the device back and restore it: POST /sleep and POST /wake."""
    restart_engine: bool = False
    """Start another engine core when one dies; without it the server ends, for a supervisor to start again."""
    tool_call_format: ToolCallFormat = ToolCallFormat.AUTO
    """How the model writes tool calls: auto, hermes, llama, or none."""
    reasoning: ReasoningFormat = ReasoningFormat.AUTO
    """auto puts text in <think> tags into reasoning_content; none leaves it in the content."""
    otlp_endpoint: str | None = None
    """Where a span for every request is sent (OTLP over HTTP), as http://127.0.0.1:4318/v1/traces; None sends none."""
    log_requests: bool = True
    """Write one line a request to the log."""

    def __post_init__(self) -> None:
        if not self.host.strip():  # to the system that means every address of this machine
            raise ConfigError("host", self.host, "must not be empty; 0.0.0.0 lets other machines in")
        for name in ("max_body_mib", "max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if not 0 <= self.max_response_store_mib <= 1 << 20:
            raise ConfigError("max_response_store_mib", self.max_response_store_mib, "must be from 0 to 1048576")
        for name in ("request_timeout_s", "body_timeout_s", "drain_timeout_s"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ConfigError(name, getattr(self, name), "must be above 0 and at most 1e6")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError("port", self.port, "must be from 0 to 65535")

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * MIB

    def api_keys(self) -> tuple[str, ...]:
        """All keys; none means that no key is asked for. Raises ConfigError when the file gives none."""
        if self.api_key_file is None:
            return self._checked(self.api_key, "api_key")
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("api_key_file", str(self.api_key_file), f"cannot be read: {error}") from None
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise ConfigError("api_key_file", str(self.api_key_file), "holds no key")
        return self._checked(self.api_key + keys, "api_key_file")

    @staticmethod
    def _checked(keys: tuple[str, ...], name: str) -> tuple[str, ...]:
        for key in keys:
            if not key or not key.isascii() or key != key.strip():
                raise ConfigError(name, "(hidden)", "every key must be ASCII, not empty, without spaces around it")
        return keys


def server_options_from(given: Mapping[str, object]) -> ServerOptions:
    """Options by name, enums by value. Raises ConfigError."""
    hints = get_type_hints(ServerOptions)
    values = {name: _converted(name, value, hints[name]) for name, value in given.items()}
    return ServerOptions(**values)  # type: ignore[arg-type]


def _converted(name: str, value: object, kind: object) -> object:
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(name, value, f"must be one of {', '.join(item.value for item in kind)}") from None
    return value
