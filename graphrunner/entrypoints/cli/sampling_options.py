"""Flags of the commands that generate text, in the names of `SamplingParams`."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Sampling"
Model = Annotated[
    str | None, typer.Option(help="Hub id, folder or GGUF file; without it the embedded SmolLM2-135M-Instruct.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_PANEL)]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.", rich_help_panel=_PANEL)]
TopP = Annotated[
    float, typer.Option(help="Keep the smallest set of tokens that reaches this probability.", rich_help_panel=_PANEL)
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=_PANEL)]
MinP = Annotated[float, typer.Option(help="Drop tokens under this share of the likeliest one.", rich_help_panel=_PANEL)]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 discourages tokens that were there before.", rich_help_panel=_PANEL)
]
SamplingSeed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=_PANEL)]
Stop = Annotated[
    list[str] | None, typer.Option(help="End at this text; may be given several times.", rich_help_panel=_PANEL)
]
