"""What `benchmarks/speculative.py` measured, as lines, as tables, as a plot, and in docs/speculative.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
_TEXT_HEAD = (
    "| method | text | drafts that stand | tokens a round | by position | tokens/s | plain | ratio | same text |"
)
_SHAPE_HEAD = "| requests | tokens/s | plain | ratio | drafts that stand | steps by width | host us a round |"


def said(row: dict) -> str:
    """A row in one line, as soon as it is there."""
    hidden = ("token_ids", "acceptance_by_position")
    return " ".join(f"{name}={_short(value)}" for name, value in row.items() if name not in hidden)


def table(result: dict) -> Iterator[str]:
    """Markdown rows; they read as well in a terminal."""
    rows = [row for row in result.get("text", []) if "error" not in row]
    if rows:
        yield from _text_table(result, rows)
        yield from _round_table(rows)
    for row in result.get("text", []):
        if "error" in row:
            yield f"{row['method']} is not run: {row['error']}"
    if result.get("shape", {}).get("rows"):
        yield from _shape_table(result)


def _text_table(result: dict, rows: Sequence[dict]) -> Iterator[str]:
    yield f"Real text, one request at a time, greedy, {result['device']}. Two counts of the same rounds: *drafts that"
    yield "stand* leave out the token that the target adds in each round; *tokens a round* have it in, as vLLM's"
    yield "mean acceptance length does."
    yield ""
    yield _TEXT_HEAD
    yield "|---" * (_TEXT_HEAD.count("|") - 1) + "|"
    for row in rows:
        shares = " ".join(f"{share:.2f}" for share in row["acceptance_by_position"])
        against = "| | | " if "speedup" not in row else (
            f"| {row['plain_tokens_per_s']:.0f} | {row['speedup']:.2f} | {row['equal_outputs']:.0%} "
        )  # fmt: skip
        stand = row["mean_accepted_length"]
        yield (
            f"| {row['method']} | {row['kind']} | {stand:.2f} | {stand + 1:.2f} "
            f"| {shares} | {row['tokens_per_s']:.0f} {against}|"
        )
    yield ""
    for method in dict.fromkeys(row["method"] for row in rows):
        held = [row["mean_accepted_length"] for row in rows if row["method"] == method and row["kind"] != "summary"]
        if held:
            mean = sum(held) / len(held)
            yield f"{method}, mean over chat and story: {mean:.2f} drafts stand, {mean + 1:.2f} tokens a round."
    yield ""


def _round_table(rows: Sequence[dict]) -> Iterator[str]:
    """Where a round's time goes, on a device that is not the host."""
    timed = [row for row in rows if row.get("host_us") is not None and "device_ms" in row]
    if not timed:
        return
    yield "A round in microseconds: *beyond* is what it takes beyond its graphs and their launches, the host's work"
    yield "that the device waits for; *host* is all of the host's work but for launches, also beside the device."
    yield ""
    yield "| method | round | beyond | host | launches | waits | ms of each graph on the device |"
    yield "|---|---|---|---|---|---|---|"
    for row in timed:
        graphs = ", ".join(f"{name}: {ms:.3f}" for name, ms in row["device_ms"].items())
        beyond_us = row["round_us"] - 1e3 * _graphs_ms(row["device_ms"])
        yield (
            f"| {row['method']} | {row['round_us']:.0f} | {beyond_us:.0f} | {row['host_us']:.0f} "
            f"| {row['launch_us']:.0f} | {row.get('waits', '')} | {graphs} |"
        )
    yield ""


def _graphs_ms(device_ms: dict[str, float]) -> float:
    """Of one round: the widest verify step and what drafts; prompts and plain steps are none of it."""
    drafts = {name: ms for name, ms in device_ms.items() if not name.startswith(("prefill_", "decode_", "verify_"))}
    verifies = [ms for name, ms in device_ms.items() if name.startswith("verify_")]
    return sum(drafts.values()) + max(verifies, default=0.0)


def _shape_table(result: dict) -> Iterator[str]:
    shape = result["shape"]
    name = "An 8B shape" if shape["is_8b"] else "A tiny shape"
    draft = f"adaptive k up to {result['num_drafts']}, a draft of acceptance {shape['acceptance']}"
    yield f"{name}, {draft}, {result['device']}:"
    yield ""
    yield _SHAPE_HEAD
    yield "|---" * (_SHAPE_HEAD.count("|") - 1) + "|"
    for row in sorted(shape["rows"], key=lambda row: row["batch"]):
        widths = ", ".join(f"{width}: {count}" for width, count in row["widths"].items())
        host_us = "" if row["host_us"] is None else f"{row['host_us']:.0f}"
        yield (
            f"| {row['batch']} | {row['tokens_per_s']:.0f} | {row['plain_tokens_per_s']:.0f} "
            f"| {row['speedup']:.2f} | {row['mean_accepted_length']:.2f} | {widths} | {host_us} |"
        )


def write_page(results: Sequence[dict], page: Path) -> None:
    """Put the tables of some runs between the page's two marks."""
    before, _, rest = page.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    lines = [line for result in results for line in (*table(result), "")]
    page.write_text("\n".join([before + _BEGIN, "", *lines, _END]) + after)


def plot(results: Sequence[dict], path: Path) -> None:
    """Acceptance by position, a panel a kind of text, and speed by batch: of the first runs that have them."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    text = [row for row in next((r["text"] for r in results if r.get("text")), []) if "error" not in row]
    shape = next((result["shape"] for result in results if result.get("shape", {}).get("rows")), {"rows": []})
    kinds, methods = (list(dict.fromkeys(row[name] for row in text)) for name in ("kind", "method"))
    figure, panels = pyplot.subplots(1, len(kinds) + 1, figsize=(3 * (len(kinds) + 1), 3.4), layout="constrained")
    *by_kind, last = panels if kinds else [panels]
    for panel, kind in zip(by_kind, kinds, strict=True):
        for index, method in enumerate(methods):
            for row in text:
                if (row["kind"], row["method"]) == (kind, method):
                    shares = row["acceptance_by_position"]
                    panel.plot(range(1, len(shares) + 1), shares, "o-", color=f"C{index}", label=method)
        panel.set(xlabel="position of the draft", ylim=(0, 1), title=kind)
        panel.xaxis.get_major_locator().set_params(integer=True)
    if kinds:
        by_kind[0].set_ylabel("share of rounds in which it stands")
        by_kind[0].legend(fontsize=8)
    rows = sorted(shape["rows"], key=lambda row: row["batch"])
    batches = [row["batch"] for row in rows]
    last.plot(batches, [row["speedup"] for row in rows], "o-", color="C0")
    last.axhline(1.0, color="grey", linewidth=0.8)
    last.set(xscale="log", xlabel="requests", ylabel="times plain decoding", title="an 8B shape, by batch")
    last.set_xticks(batches, [str(batch) for batch in batches])
    last.minorticks_off()
    figure.savefig(path)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace(" ", "")
