"""What the user asked for, checked where it is made."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphrunner.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_SPECULATIVE_TOKENS = 16
_SEED_LIMIT = 1 << 63
_FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "speculative",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop. Names and defaults are those of vLLM's offline API.

    Args:
        n: how many outputs for the prompt, 1 to 128.
        temperature: 0 is greedy; at most 100.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens under min_p times the likeliest one's probability, in [0, 1].
        repetition_penalty: above 0; over 1 discourages tokens of the prompt and the output.
        presence_penalty, frequency_penalty: in [-2, 2]; count output tokens only.
        logit_bias: token id -> added to its logit, in [-100, 100].
        seed: reproducible alone or in any batch; None draws one.
        max_tokens: most tokens to generate; None means up to the context limit.
        min_tokens: no stop before that many.
        stop: strings that end the output (not part of the text unless include_stop_str_in_output).
        stop_token_ids: ids that end the output.
        ignore_eos: go on after the model's own end token.
        logprobs, prompt_logprobs: how many of the likeliest tokens to report, 0 to 20; None reports nothing.
        detokenize: produce text.
        skip_special_tokens, spaces_between_special_tokens: how text is made.
        structured_output: a JSON schema, regex or grammar; see `StructuredOutput`.
        speculative: whether drafts may be verified for it, in an engine that speculates.
        num_speculative_tokens: most drafts a round, 1 to 16; None is the engine's own number.

    Raises:
        InvalidRequestError: names the field and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_output: "StructuredOutput | None" = None
    speculative: bool = True
    num_speculative_tokens: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_int("top_k", self.top_k, -1, 1 << 31)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_is_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 1 << 31)
        _check_int("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if self.seed is not None:
            _check_int("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            _check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        self._check_flags()
        object.__setattr__(self, "logit_bias", self._checked_bias())
        object.__setattr__(self, "stop_strings", self._checked_stops())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_ids())

    def _check_flags(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(name, getattr(self, name), "must be true or false")
        shape = self.structured_output
        if shape is not None and not isinstance(shape, StructuredOutput):
            raise InvalidRequestError("structured_output", shape, "must be a StructuredOutput")
        if shape is not None and self.min_tokens > 0:
            raise InvalidRequestError("min_tokens", self.min_tokens, "structured_output says itself when the text ends")

    def _checked_bias(self) -> Mapping[int, float] | None:
        if self.logit_bias is None:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError("logit_bias", self.logit_bias, "must map token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, 1 << 31)
            _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        return dict(self.logit_bias)

    def _checked_stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, "strings")
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"{len(stops)} strings", f"at most {MAX_STOP_STRINGS} are allowed")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidRequestError("stop", self.stop, "every stop must be a string that is not empty")
        if stops and not self.detokenize:
            raise InvalidRequestError("stop", self.stop, "needs detokenize=True")
        return stops

    def _checked_stop_ids(self) -> tuple[int, ...]:
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "token ids")
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, 1 << 31)
        return ids

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether picking a token needs the earlier ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InvalidRequestError: names the field and the id.
        """
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids or ())):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(name, token_id, f"token ids go from 0 to {vocab_size - 1}")

    def clone(self, **changes: object) -> "SamplingParams":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A shape that the text must have; exactly one field is set.

    Args:
        json_schema: a JSON schema as text; "{}" accepts any JSON object.
        regex: a regular expression.
        grammar: a grammar in EBNF.
        choice: the allowed strings.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = ("json_schema", "regex", "grammar", "choice")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError("structured_output", given, f"set exactly one of {', '.join(names)}")
        name, value = given[0], getattr(self, given[0])
        if name != "choice":
            if not isinstance(value, str):
                raise InvalidRequestError(f"structured_output.{name}", value, "must be text")
            return
        choices = () if isinstance(value, str) else _as_tuple("structured_output.choice", value, "strings")
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise InvalidRequestError("structured_output.choice", value, "must be a list of strings that is not empty")
        object.__setattr__(self, "choice", choices)


def _as_tuple(name: str, values: object, items: str) -> tuple:
    """None, or a list of something, as a tuple."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection):
        raise InvalidRequestError(name, values, f"must be a list of {items}")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, value, "must be an integer")
    if not low <= value <= high:
        raise InvalidRequestError(name, value, f"must be from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, *, low_is_open: bool = False) -> None:
    # Too large an integer cannot become a float; the range below refuses it.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequestError(name, value, "must be a finite number")
    assert isinstance(value, (int, float))
    if value > high or value < low or (low_is_open and value == low):
        raise InvalidRequestError(name, value, f"must be {'above' if low_is_open else 'from'} {low:g} up to {high:g}")
