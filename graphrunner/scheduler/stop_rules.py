"""When a request ends, token by token.

Order of the checks, for each token in turn, and nothing after the token that ends it is kept:

1. fewer than `min_tokens` tokens so far: no stop id counts
2. the model's end token, unless `ignore_eos`      -> STOP
3. one of `stop_token_ids`                         -> STOP, with the id as reason
4. `max_new_tokens` reached                        -> LENGTH

Stop strings need text and are found by whoever makes it, who then calls `Scheduler.finish`.
"""

from collections.abc import Sequence

from graphrunner.core.request import FinishReason, Request


def stop_ids_of(request: Request) -> frozenset[int]:
    """Every id that ends the request."""
    params = request.sampling_params
    eos_ids = frozenset() if params.ignore_eos else request.eos_token_ids
    return eos_ids | frozenset(params.stop_token_ids or ())


def append_tokens(request: Request, token_ids: Sequence[int]) -> FinishReason | None:
    """Append tokens up to the first that ends the request, and say whether and how it ends.

    Sets `stop_reason`; the status is left to the caller. Tokens past the end are not appended.
    """
    output = request.output_token_ids
    min_tokens = request.sampling_params.min_tokens
    for token_id in token_ids:
        output.append(token_id)
        if token_id in request.stop_ids and len(output) >= min_tokens:
            is_eos = token_id in request.eos_token_ids and not request.sampling_params.ignore_eos
            request.stop_reason = None if is_eos else token_id
            return FinishReason.STOP
        if len(output) >= request.max_new_tokens:
            return FinishReason.LENGTH
    return None
