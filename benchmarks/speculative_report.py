"""What `benchmarks/speculative.py` measured, as tables, as a plot, and in docs/speculative.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


def table(result: dict) -> Iterator[str]:
    """Markdown rows; they read as well in a terminal."""
    if result.get("text"):
        yield f"Real text, one request at a time, greedy, k = {result['num_drafts']}, {result['device']}:"
        yield ""
        yield "| method | text | drafts that stand | by position | tokens/s | plain | ratio |"
        yield "|---|---|---|---|---|---|---|"
        for row in result["text"]:
            shares = " ".join(f"{share:.2f}" for share in row["acceptance_by_position"])
            yield (
                f"| {row['method']} | {row['kind']} | {row['mean_accepted_length']:.2f} | {shares} "
                f"| {row['tokens_per_s']:.0f} | {row['plain_tokens_per_s']:.0f} | {row['speedup']:.2f} |"
            )
        yield ""
    if result.get("shape"):
        shape = result["shape"]
        name = "An 8B shape" if shape["is_8b"] else "A tiny shape"
        draft = f"adaptive k up to {result['num_drafts']}, a draft of acceptance {shape['acceptance']}"
        yield f"{name}, {draft}, {result['device']}:"
        yield ""
        yield "| requests | tokens/s | plain | ratio | drafts that stand | steps by width | host us a round |"
        yield "|---|---|---|---|---|---|---|"
        for row in shape["rows"]:
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


def plot(result: dict, path: Path) -> None:
    """Acceptance by position, and speed by batch."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for row in result.get("text", []):
        shares = row["acceptance_by_position"]
        left.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{row['method']}, {row['kind']}")
    left.set(xlabel="position of the draft", ylabel="share that stands", ylim=(0, 1), title="Acceptance by position")
    if result.get("text"):
        left.legend(fontsize=7)
    rows = result["shape"]["rows"] if result.get("shape") else []
    right.plot([row["batch"] for row in rows], [row["speedup"] for row in rows], marker="o")
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(xscale="log", xlabel="requests", ylabel="times plain decoding", title="Speed by batch")
    figure.tight_layout()
    figure.savefig(path)
