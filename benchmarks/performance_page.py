"""Writes what docs/performance.md and README.md say of a saved run, so that pages and figures never disagree.

    python benchmarks/performance_page.py [--check]

What stands between the markers of docs/performance.md is replaced by tables of docs/benchmarks/h200.json and
h200_profile.json, and by the pictures that are there; in the README, single values are. `--check` writes nothing and
fails when a page would change.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from marks import NANO_TOKENS_PER_S, PEER_DECODE_MS, PEER_FIRST_TOKEN, PEER_OFFLINE_TOKENS_PER_S
from result_rows import ROOT, Row, load_rows, sort_key

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
BEGIN = "<!-- tables of docs/benchmarks/h200.json: python benchmarks/performance_page.py -->"
END = "<!-- end of tables -->"
VALUE = re.compile(r"<!-- h200: (\S+) -->.*?<!-- /h200 -->")
NUM_KERNELS = 8
HEAD = "| row | value | floor | share of floor | peer | must | aim | |\n|---|---|---|---|---|---|---|---|"

SECTIONS = (
    ("A decode step through `LLM.generate`", ("decode/",)),
    ("The bare replay of the same steps, and what the host adds at batch 1", ("bare/", "host_share/")),
    ("First tokens", ("ttft/", "prefill")),
    ("Prefill with graphs against eager, times faster, one prompt of so many tokens", ("small_prefill/",)),
    ("Output tokens a second", ("offline", "nano/")),
    ("Start and capture", ("start/", "capture/")),
    ("The device", ("ceiling/",)),
)


PICTURES = {
    "h200_decode.svg": "ms a decode step by batch: LLM.generate, bare replay, floor, vLLM",
    "h200_profile.svg": "where the time of a step goes, kernel by kernel",
    "h200_offline.svg": "where the time of an offline run goes, and the least that each part could take",
    "h200_start.svg": "a cold and a warm start by phase, and what each recorded size takes",
}


def tables(rows: Sequence[Row], profiles: dict[str, dict]) -> str:
    """All tables as Markdown, and the pictures beside the page."""
    if not rows:
        return "No run is saved."
    asked = [row for row in rows if row.verdict]
    reached = sum(row.verdict != "fall short" for row in asked)
    commits = ", ".join(sorted({row.commit for row in rows}))
    parts = [f"{reached} of {len(asked)} marks reached. Measured at commit {commits}."]
    for title, prefixes in SECTIONS:
        found = [row for row in rows if row.name.startswith(prefixes)]
        if found:
            parts.append("\n".join([f"### {title}", "", HEAD, *(_line(row) for row in found)]))
    parts += [
        _profile(name, value)
        for name, value in sorted(profiles.items(), key=lambda item: sort_key(item[0]))
        if "kernels" in value
    ]
    parts += [_offline(name, value) for name, value in sorted(profiles.items()) if "parts" in value]
    images = [name for name in PICTURES if (PAGE.parent / "images" / name).exists()]
    parts += [f"![{PICTURES[name]}](images/{name})" for name in images]
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    share = f"{row.floor_share:.0%}" if row.floor_share else ""
    verdict = f"**{row.verdict}**" if row.verdict == "fall short" else row.verdict
    cells = [_number(each) for each in (row.floor, share, peer_of(row.name), row.must, row.aim)]
    return f"| {row.name} | {_number(row.value)} {row.unit} | {' | '.join(cells)} | {verdict} |"


def _profile(name: str, step: dict) -> str:
    """The kernels of one step that take the most of it."""
    kernels = sorted(step["kernels"].items(), key=lambda item: -item[1]["us"])
    whole_us = step["idle_us"] + sum(spent["us"] for _, spent in kernels) or 1.0
    lines = [f"### Where the time goes: {name}, {step['step_us']:,.0f} us", ""]
    lines += ["| kernel | launches | us | share |", "|---|---|---|---|"]
    lines += [
        f"| {kernel} | {spent['count']:g} | {spent['us']:.1f} | {spent['us'] / whole_us:.0%} |"
        for kernel, spent in kernels[:NUM_KERNELS]
    ]
    rest_us = sum(spent["us"] for _, spent in kernels[NUM_KERNELS:])
    lines += [f"| all others | | {rest_us:.1f} | {rest_us / whole_us:.0%} |"] if rest_us else []
    return "\n".join([*lines, f"| none running | | {step['idle_us']:.1f} | {step['idle_us'] / whole_us:.0%} |"])


def _offline(name: str, run: dict) -> str:
    """The parts of an offline run beside their floors."""
    lines = [f"### Where the time goes: {name}, {run['whole_s']:.2f} s", ""]
    lines += ["| part | steps | s | floor, s | share of floor |", "|---|---|---|---|---|"]
    lines += [
        f"| {part['part']} | {part['num_steps']} | {part['spent_s']:.2f} | {part['floor_s']:.2f} | "
        f"{part['floor_s'] / part['spent_s']:.0%} |"
        for part in run["parts"]
        if part["spent_s"]
    ]
    outside_s = run["whole_s"] - sum(part["spent_s"] for part in run["parts"])
    return "\n".join([*lines, f"| between steps | | {outside_s:.2f} | | |"])


def peer_of(name: str) -> float | None:
    """What another engine measured on such a machine: vLLM 0.26.0, or nano-vllm for its own workload."""
    if name in PEER_FIRST_TOKEN:
        return PEER_FIRST_TOKEN[name]
    kind, _, rest = name.partition("/")
    shape, _, batch = rest.partition("/batch")
    if kind == "decode" and batch:
        return PEER_DECODE_MS.get(shape, {}).get(int(batch))
    if kind == "nano" and batch:
        return NANO_TOKENS_PER_S.get(int(batch))
    return PEER_OFFLINE_TOKENS_PER_S.get(shape) if kind == "offline" else None


def _number(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def with_tables(page: str, text: str) -> str:
    """The page with everything between the markers replaced."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def with_values(page: str, rows: Sequence[Row]) -> str:
    """The page with every marked value replaced. Raises KeyError for a row that no run has saved."""
    by_name = {row.name: row for row in rows}

    def value(match: re.Match[str]) -> str:
        row = by_name[match[1]]
        shown = f"{row.value:.2f}" if row.value < 10 else f"{row.value:,.0f}"
        return f"<!-- h200: {row.name} -->{shown} {row.unit}<!-- /h200 -->"

    return VALUE.sub(value, page)


def main() -> None:
    """Parse the command line; write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a page would change")
    parser.add_argument("--from", dest="source", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--readme", type=Path, default=README)
    args = parser.parse_args()
    profile_path = args.source / "h200_profile.json"
    profiles = json.loads(profile_path.read_text()) if profile_path.exists() else {}
    rows = load_rows(args.source / "h200.json")
    old = {path: path.read_text() for path in (args.page, args.readme)}
    new = {
        args.page: with_tables(old[args.page], tables(rows, profiles)),
        args.readme: with_values(old[args.readme], rows),
    }
    changed = [path for path in new if new[path] != old[path]]
    if args.check:
        names = ", ".join(str(path) for path in changed)
        sys.exit(f"{names} disagrees with {args.source}: run benchmarks/performance_page.py" if changed else 0)
    for path in changed:
        path.write_text(new[path])


if __name__ == "__main__":
    main()
