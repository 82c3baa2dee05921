"""Prompts that a model answers to make its own training text: every combination of a few lists.

The last entries of each list are held out: evaluation prompts are made of them alone, training prompts never hold one.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_PARTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("prompt_parts.json").read_text())
_NUM_HELD_OUT = {"topics": 14, "names": 5, "places": 4}


class Kind(Enum):
    """What a prompt asks for."""

    CHAT = "chat"
    STORY = "story"
    TASK = "task"
    PASSAGE = "passage"


HELD_OUT_KINDS = (Kind.CHAT, Kind.STORY, Kind.TASK)
_SHARES = {Kind.CHAT: 0.4, Kind.TASK: 0.2, Kind.STORY: 0.28, Kind.PASSAGE: 0.12}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is said to the model: user turns of a conversation, or texts to continue as they are."""

    kind: Kind
    turns: tuple[str, ...]
    is_chat: bool


def training_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` prompts of all kinds that hold nothing held out."""
    draw = random.Random(seed)
    kinds = draw.choices(list(_SHARES), weights=list(_SHARES.values()), k=count)
    return [_prompt(kind, draw, is_held_out=False) for kind in kinds]


def held_out_prompts(kind: Kind, count: int, seed: int) -> list[Prompt]:
    """`count` prompts of one kind about topics, people and places that no training prompt has; one turn each."""
    draw = random.Random(seed)
    return [
        Prompt(p.kind, p.turns[:1], p.is_chat) for p in (_prompt(kind, draw, is_held_out=True) for _ in range(count))
    ]


def _prompt(kind: Kind, draw: random.Random, *, is_held_out: bool) -> Prompt:
    topic = _pick("topics", draw, is_held_out)
    if kind in (Kind.CHAT, Kind.TASK):
        first = draw.choice(_PARTS["questions"] if kind is Kind.CHAT else _PARTS["tasks"])
        others = draw.sample(_PARTS["follow_ups"], 4)
        return Prompt(kind, tuple(turn.format(t=topic) for turn in [first, *others]), True)
    if kind is Kind.PASSAGE:
        return Prompt(kind, tuple(draw.choice(_PARTS["passages"]).format(t=topic) for _ in range(3)), False)
    openers = tuple(_opener(draw, is_held_out) for _ in range(3))
    if draw.random() < 0.25:
        return Prompt(kind, tuple(f"Write a story that begins like this: {one}" for one in openers), True)
    return Prompt(kind, openers, False)


def _opener(draw: random.Random, is_held_out: bool) -> str:
    name, place = _pick("names", draw, is_held_out), _pick("places", draw, is_held_out)
    text = draw.choice(_PARTS["openers"]).format(n=name, p=place)
    return text[0].upper() + text[1:]


def _pick(name: str, draw: random.Random, is_held_out: bool) -> str:
    entries = _PARTS[name]
    border = len(entries) - _NUM_HELD_OUT[name]
    return draw.choice(entries[border:] if is_held_out else entries[:border])
