"""The door's count: how much is inside, and whether anyone may still come in."""

from __future__ import annotations

import asyncio

from graphrunner.entrypoints.openai.engine_client import Health, HealthState
from graphrunner.entrypoints.openai.errors import bad_request, too_busy, unavailable


class Ticket:
    """Room for some sequences; give it back with `release`, which is idempotent."""

    def __init__(self, admission: Admission, num_sequences: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences

    def release(self) -> None:
        num, self._num_sequences = self._num_sequences, 0
        self._admission.give_back(num)


class Admission:
    """Bounded and drainable. Lives on the event loop.

    Args:
        max_sequences: most outputs being made or waited for at once.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.num_sequences = 0
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def enter(self, num_sequences: int, health: Health, field: str) -> Ticket:
        """Take room.

        Args:
            field: of the request, that asks for so many.

        Raises:
            ApiError: 400 more than there is room for ever, 429 no room now, 503 draining or the engine is not ready.
        """
        if num_sequences > self.max_sequences:
            problem = f"asks for {num_sequences} outputs, and the server holds at most {self.max_sequences} at once"
            raise bad_request(field, problem, "invalid_value")
        if self._is_draining:
            raise unavailable("the server is shutting down")
        if health.state is not HealthState.READY:
            raise unavailable(f"the engine is {health.state.value}")
        if self.num_sequences + num_sequences > self.max_sequences:
            raise too_busy(f"{self.num_sequences} of at most {self.max_sequences} requests are in the server")
        self.num_sequences += num_sequences
        self._is_empty.clear()
        return Ticket(self, num_sequences)

    def give_back(self, num_sequences: int) -> None:
        self.num_sequences -= num_sequences
        if self.num_sequences == 0:
            self._is_empty.set()

    def drain(self) -> None:
        """Let nobody in any more."""
        self._is_draining = True

    async def wait_empty(self) -> None:
        """Return when everyone has left."""
        await self._is_empty.wait()
