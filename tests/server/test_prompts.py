"""Tokenizing beside everything else: what waits for what."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from scripted_engine import VOCAB_SIZE, ByteTokenizer

from graphrunner.entrypoints.openai.prompts import LONG_LEN, PromptEncoder


class _Held(ByteTokenizer):
    """Long texts wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= LONG_LEN:
            assert self.let_go.wait(10)
        return super().encode(text, add_special_tokens=add_special_tokens)


@dataclass
class _Client:
    """What `PromptEncoder` asks of an engine's client."""

    tokenizer: _Held = field(default_factory=_Held)
    vocab_size: int = VOCAB_SIZE


def test_short_texts_do_not_wait_for_long_ones() -> None:
    client = _Client()
    encoder = PromptEncoder(client)  # type: ignore[arg-type]

    async def run() -> None:
        async with asyncio.timeout(10):
            long = [asyncio.create_task(encoder.encode(["a" * LONG_LEN], "prompt")) for _ in range(4)]
            await asyncio.sleep(0.05)
            assert (await encoder.encode(["hi"], "prompt"))[0].token_ids == [104, 105]
            assert await encoder.decode([104], "tokens") == "h"
            assert not any(task.done() for task in long)
            client.tokenizer.let_go.set()
            assert [len(one[0].token_ids) for one in await asyncio.gather(*long)] == [LONG_LEN] * 4

    try:
        asyncio.run(run())
    finally:
        encoder.close()
