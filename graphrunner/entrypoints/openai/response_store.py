"""Responses that may be asked for again, and the conversations that `previous_response_id` goes on with.

In memory, bounded, the least recently used go first; nothing is kept over a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from graphrunner.entrypoints.openai.protocol import Message

MESSAGE_OVERHEAD_BYTES = 1024
"""What a message costs beside its text."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        body: the response as it was answered, JSON.
        messages: the conversation up to and with this response, without instructions.
    """

    body: bytes
    messages: Sequence[Message]

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        return len(self.body) + sum(_size(message) for message in self.messages)


class ResponseStore:
    """Lives on the event loop.

    Args:
        max_bytes: of all kept responses together; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and drop old ones until all fit. One that is too large alone is not kept."""
        self._kept[response_id] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """A kept response; None when it was not stored, dropped or deleted."""
        response = self._kept.get(response_id)
        if response is not None:
            self._kept.move_to_end(response_id)
        return response

    def delete(self, response_id: str) -> bool:
        """Forget a response; whether it was there."""
        response = self._kept.pop(response_id, None)
        if response is None:
            return False
        self._num_bytes -= response.num_bytes
        return True


def _size(message: Message) -> int:
    calls = sum(len(call.function.arguments) + MESSAGE_OVERHEAD_BYTES for call in message.tool_calls or ())
    return MESSAGE_OVERHEAD_BYTES + len(str(message.content or "")) + len(message.reasoning_content or "") + calls
