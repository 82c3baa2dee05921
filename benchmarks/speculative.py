"""Speculation: acceptance by position, accepted length, speed by batch, host time a round. One table, one JSON line.

    python benchmarks/speculative.py [--model PATH] [--parts text,shape] [--methods ngram,eagle] [--json FILE]
    python benchmarks/speculative.py --from-json FILE,... --plot docs/images/speculative.svg --page docs/speculative.md

`text` runs a real model (default: the embedded one; a GGUF file or a checkpoint folder elsewhere) over prompts of three
kinds, one at a time, greedily, plain and with each method at its most drafts. `shape` runs random weights of an 8B
shape (on a CPU: a tiny one) with a stand-in draft of given acceptance and adaptive k, by batch, against an engine
without speculation. Both sides of every ratio are the better of two timed runs, in neither of which a graph was
recorded or a kernel compiled or loaded: runs that meet such a thing are done again. Host time is a round's wall time
without the wait for the device's tokens and without graph launches, a median over the rounds of timed runs; on a card
some hundred rounds of the same prompts come before them, since the caches of a server at work are warm.

Every figure is printed and saved as soon as it is measured. Nothing new begins after `--max-seconds` of the process, of
which `text` gets 45% when `shape` is to follow. What each part and each start took is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import stand_in_proposer
from speculative_report import plot, said, table, write_page
from speculative_shape import MOST_DRAFTS, shape_rows
from speculative_text import METHODS, TextPlan, held_out, text_rows

from graphrunner.telemetry.startup import process_age_s

_TEXT_SHARE = 0.45


def main() -> None:
    """See the module."""
    args = _arguments()
    if args.from_json:
        results = [json.loads(Path(name).read_text()) for name in args.from_json.split(",")]
        if args.plot:
            plot(results, Path(args.plot))
        if args.page:
            write_page(results, Path(args.page))
        return
    result = measured(args)
    print("\n".join(["", *table(result), ""]))
    print(json.dumps(result))


def measured(args: argparse.Namespace) -> dict:
    """Run the parts; what is done is in the file, whatever becomes of the rest."""
    import torch

    is_gpu, parts = torch.cuda.is_available(), args.parts.split(",")
    device = torch.cuda.get_device_name() if is_gpu else "cpu"
    result: dict = {"benchmark": "speculative", "num_drafts": MOST_DRAFTS, "device": device, "part_s": {}}

    def has_time(share: float = 1.0) -> bool:
        return process_age_s() < share * args.max_seconds

    def save(line: str) -> None:
        print(f"[{process_age_s():6.1f} s] {line}", flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(result) + "\n")

    def add(rows: list[dict], row: dict) -> None:
        rows.append(row)
        save(said(row))

    def spent(part: str) -> None:
        result["part_s"][part] = process_age_s() - sum(result["part_s"].values())
        save(f"{part} took {result['part_s'][part]:.1f} s")

    spent("imports")
    if "text" in parts:
        result["text"] = []
        methods, prompts = args.methods.split(","), held_out(args.num_prompts)
        plan = TextPlan(args.model, methods, prompts, args.num_tokens, 2, is_gpu)
        share = _TEXT_SHARE if "shape" in parts else 1.0
        for row in text_rows(plan, lambda: has_time(share)):
            add(result["text"], row)
        spent("text")
    if "shape" in parts:
        result["shape"] = {"acceptance": stand_in_proposer.ACCEPTANCE, "is_8b": is_gpu, "rows": []}
        for row in shape_rows(is_gpu, None if is_gpu else min(args.num_tokens, 64), has_time):
            add(result["shape"]["rows"], row)
        spent("shape")
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--parts", default="text,shape")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--num-prompts", type=int, default=8, help="of each kind")
    parser.add_argument(
        "--num-tokens", type=int, default=128, help="most tokens of an answer; on a card not of `shape`"
    )
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--page")
    parser.add_argument("--from-json")
    args = parser.parse_args()
    if (args.plot or args.page) and not args.from_json:
        sys.exit("--plot and --page need --from-json: they show what an earlier run wrote")
    unknown = set(args.methods.split(",")) - set(METHODS)
    if unknown:
        sys.exit(f"--methods {','.join(sorted(unknown))}: known are {', '.join(METHODS)}")
    return args


if __name__ == "__main__":
    main()
