"""The exception tree.

GraphRunnerError
|-- ConfigError(ValueError)          a flag or an argument of the engine; names it and the value seen
|-- ModelLoadError                   a model that cannot be found, read or fitted
|-- InvalidRequestError(ValueError)  a request refused at the door; names the field and the value
|-- EngineStateError                 not possible now: the engine is asleep, or has requests to finish first
|-- CaptureError                     one shape could not be recorded; the engine serves it eagerly
|-- EmbeddingFailedError             a step broke, or the model gave a vector without a direction
|-- GraphCheckError                  the graph check found that a replay is not what eager gives
|-- OutOfPagesError                  the page allocator was asked for more than it has
`-- EngineDeadError                  the engine core stopped; carries its reason
"""


class GraphRunnerError(Exception):
    """Base of everything this package raises on purpose."""


class _FieldError(GraphRunnerError, ValueError):
    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field}={_shown(value)}: {problem}")
        self.field = field
        self.value = value
        self.problem = problem


class ConfigError(_FieldError):
    """A setting of the engine that cannot work.

    Args:
        field: the flag or argument, as the user wrote it.
        value: what was seen.
        problem: what is wrong and what to change.
    """


class InvalidRequestError(_FieldError):
    """A request that cannot be served; nothing of it has entered the engine. Fields as in `ConfigError`."""


class EngineStateError(GraphRunnerError):
    """Not possible in the engine's present state; the message says what to do first."""


class ModelLoadError(GraphRunnerError):
    """The model cannot be loaded; the message is one line that names the path or tensor."""


class CaptureError(GraphRunnerError):
    """Recording one shape failed; the message names the key."""


class EmbeddingFailedError(GraphRunnerError):
    """An embedding request ended without a usable vector; the message names it and the cause."""


class GraphCheckError(GraphRunnerError):
    """A replay differs from eager; the message names runner, key, requests and the place."""


class OutOfPagesError(GraphRunnerError):
    """More KV pages were asked for than are free."""


class EngineDeadError(GraphRunnerError):
    """The engine stopped and can serve nothing more; the message holds the first cause."""


def _shown(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, which Python declines to print
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."
