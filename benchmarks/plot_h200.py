"""Pictures of a saved run: step time against its floor, start and capture, where steps and offline runs spend time.

    python benchmarks/plot_h200.py [--from docs/benchmarks] [--into docs/images]

Reads h200.json and h200_profile.json and nothing else; a picture whose figures are not there is left out.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from marks import PEER_DECODE_MS
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from result_rows import ROOT, Row, load_rows

SHAPES = ("0.6B", "1B", "8B")
NUM_NAMED_KERNELS = 7
OURS, BARE, FLOOR, PEER = "#1f5fa8", "#6fa8dc", "#555555", "#c0504d"

Rows = dict[str, Row]
Profiles = dict[str, dict]


def decode_figure(rows: Rows, profiles: Profiles) -> Figure | None:
    """Milliseconds a step by batch size, a panel a shape."""
    shapes = [shape for shape in SHAPES if _batches(rows, f"decode/{shape}")]
    if not shapes:
        return None
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 3.8), squeeze=False)
    for panel, shape in zip(panels[0], shapes, strict=True):
        batches = _batches(rows, f"decode/{shape}")
        measured = [rows[f"decode/{shape}/batch{batch}"] for batch in batches]
        peer = [(batch, PEER_DECODE_MS[shape][batch]) for batch in batches if batch in PEER_DECODE_MS.get(shape, {})]
        bare = _batches(rows, f"bare/{shape}")
        panel.plot([b for b, _ in peer], [ms for _, ms in peer], "s--", color=PEER, label="vLLM 0.26.0")
        panel.plot(batches, [row.value for row in measured], "o-", color=OURS, label="LLM.generate")
        bare_ms = [rows[f"bare/{shape}/batch{batch}"].value for batch in bare]
        panel.plot(bare, bare_ms, ".-", color=BARE, label="bare replay")
        panel.plot(batches, [row.floor for row in measured], ":", color=FLOOR, label="floor")
        panel.set(xscale="log", yscale="log", xlabel="batch", title=shape)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="both", alpha=0.2)
    panels[0][0].set_ylabel("ms a decode step")
    panels[0][0].legend(fontsize=8)
    return figure


def start_figure(rows: Rows, profiles: Profiles) -> Figure | None:
    """Phases of a cold and a warm start; what each recorded size took."""
    starts = {name: value for name, value in profiles.items() if name.startswith("start/")}
    warm = [value for name, value in starts.items() if name.startswith("start/warm")]
    if not warm:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 3.8))
    phases = list(dict.fromkeys(phase for value in starts.values() for phase in value["phases_s"]))
    colours = pyplot.get_cmap("tab20")
    begin = dict.fromkeys(starts, 0.0)
    for index, phase in enumerate(phases):
        spent = {name: value["phases_s"].get(phase, 0.0) for name, value in starts.items()}
        left.barh(list(spent), list(spent.values()), left=list(begin.values()), color=colours(index), label=phase)
        begin = {name: begin[name] + seconds for name, seconds in spent.items()}
    left.set(xlabel="s from process start to first token")
    left.legend(fontsize=7)
    series: dict[str, list[tuple[int, float]]] = {}
    for graph in warm[0]["graphs"]:
        is_decode = graph["runner"].startswith("decode")
        name = f"decode, {graph['variant']}" if is_decode else "prefill and mixed"
        series.setdefault(name, []).append((graph["num_reqs"] if is_decode else graph["num_tokens"], graph["ms"]))
    for name, points in series.items():
        ordered = sorted(points)
        right.plot([size for size, _ in ordered], [ms for _, ms in ordered], ".-", label=name)
    right.set(xscale="log", yscale="log", xlabel="requests (decode) or tokens (prefill)", ylabel="ms to record")
    right.grid(True, alpha=0.2)
    right.legend(fontsize=8)
    return figure


def profile_figure(rows: Rows, profiles: Profiles) -> Figure | None:
    """Where the device's time of a step goes, kernel by kernel, in shares."""
    steps = {name: value for name, value in profiles.items() if "kernels" in value}
    if not steps:
        return None
    totals: dict[str, float] = {}
    for value in steps.values():
        for kernel, spent in value["kernels"].items():
            totals[kernel] = totals.get(kernel, 0.0) + spent["us"] / _busy_us(value)
    named = sorted(totals, key=lambda kernel: -totals[kernel])[:NUM_NAMED_KERNELS]
    figure, panel = pyplot.subplots(figsize=(11, 0.6 * len(steps) + 2))
    names = [f"{name}, {value['step_us']:.0f} us" for name, value in steps.items()]
    begin = [0.0] * len(steps)
    colours = pyplot.get_cmap("tab20")
    for index, kernel in enumerate([*named, "other kernels", "idle"]):
        shares = [_share(value, kernel, named) for value in steps.values()]
        panel.barh(names, shares, left=begin, color=colours(index), label=kernel.lstrip("_"))
        begin = [place + share for place, share in zip(begin, shares, strict=True)]
    panel.set(xlabel="% of the device's time", xlim=(0, 100))
    panel.invert_yaxis()
    panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    return figure


def offline_figure(rows: Rows, profiles: Profiles) -> Figure | None:
    """Seconds of an offline run by part, beside the least that each could take; a panel a shape."""
    runs = [(shape, profiles[f"offline/{shape}"]) for shape in SHAPES if f"offline/{shape}" in profiles]
    if not runs:
        return None
    figure, panels = pyplot.subplots(1, len(runs), figsize=(4.2 * len(runs), 3.4), squeeze=False, sharey=True)
    for panel, (shape, run) in zip(panels[0], runs, strict=True):
        names = [part["part"] for part in run["parts"]]
        panel.barh(names, [part["spent_s"] for part in run["parts"]], color=BARE, label="measured")
        panel.barh(names, [part["floor_s"] for part in run["parts"]], height=0.3, color=FLOOR, label="floor")
        panel.set(xlabel="s", title=f"offline/{shape}, {run['whole_s']:.1f} s")
    panels[0][0].invert_yaxis()
    panels[0][0].legend(fontsize=8)
    return figure


def _share(step: dict, kernel: str, named: list[str]) -> float:
    whole = _busy_us(step)
    if kernel == "idle":
        return 100 * step["idle_us"] / whole
    if kernel == "other kernels":
        return 100 * sum(spent["us"] for name, spent in step["kernels"].items() if name not in named) / whole
    return 100 * step["kernels"].get(kernel, {"us": 0.0})["us"] / whole


def _busy_us(step: dict) -> float:
    return step["idle_us"] + sum(spent["us"] for spent in step["kernels"].values()) or 1.0


def _batches(rows: Rows, prefix: str) -> list[int]:
    return sorted(int(name.rsplit("batch", 1)[1]) for name in rows if name.startswith(prefix + "/batch"))


FIGURES: dict[str, Callable[[Rows, Profiles], Figure | None]] = {
    "h200_decode.svg": decode_figure,
    "h200_start.svg": start_figure,
    "h200_profile.svg": profile_figure,
    "h200_offline.svg": offline_figure,
}


def draw_all(source: Path, target: Path) -> list[str]:
    """Write every picture that there are figures for; their names."""
    rows = {row.name: row for row in load_rows(source / "h200.json")}
    path = source / "h200_profile.json"
    profiles = json.loads(path.read_text()) if path.exists() else {}
    pyplot.switch_backend("Agg")
    pyplot.rcParams["svg.hashsalt"] = "h200"  # the same figures give the same file
    target.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in FIGURES.items():
        figure = draw(rows, profiles)
        if figure is None:
            continue
        figure.savefig(target / name, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
        drawn.append(name)
    return drawn


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    print(f"drawn: {', '.join(draw_all(args.source, args.into)) or 'nothing, no run is saved'}")


if __name__ == "__main__":
    main()
