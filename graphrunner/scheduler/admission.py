"""The door: what can never be served is refused before anything of it enters the engine."""

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.request import Request


class QueueFullError(InvalidRequestError):
    """The queue is at `max_queue_len`; the request may be tried again later."""


def check_request(request: Request, max_model_len: int, pool_len: int) -> None:
    """Refuse a request that cannot get even one token.

    Args:
        request: new; its prompt is not changed.
        max_model_len: context limit, tokens of prompt and output together.
        pool_len: tokens whose KV fits in the pool, or in one row of the page table, when it runs alone.

    Raises:
        InvalidRequestError: names the prompt's length and the limit it breaks.
    """
    prompt_len = request.num_prompt_tokens
    if prompt_len == 0:
        raise InvalidRequestError("prompt", [], "must hold at least one token")
    # A pooled prompt yields no token, so it may fill the whole context.
    needed_len = prompt_len if request.wants_pooling else prompt_len + 1
    if needed_len > max_model_len:
        raise InvalidRequestError(
            "prompt", f"{prompt_len} tokens", f"must leave room for output in the context of {max_model_len} tokens"
        )
    if needed_len > pool_len:
        raise InvalidRequestError(
            "prompt", f"{prompt_len} tokens", f"must leave room in the KV pool of {pool_len} tokens"
        )


def capped_max_new_tokens(request: Request, max_model_len: int, pool_len: int) -> int:
    """The output limit that the context and the pool leave; a request that reaches it ends with LENGTH.

    For a pooled prompt 1, so that `Request.final_len` is the prompt's length.
    """
    if request.wants_pooling:
        return 1
    return min(request.max_new_tokens, min(max_model_len, pool_len) - request.num_prompt_tokens)
