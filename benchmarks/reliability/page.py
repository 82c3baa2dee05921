"""docs/reliability.md from docs/benchmarks/reliability.json: `python benchmarks/reliability/page.py` writes it."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability

What the server is tried with, how often, and what came of it. Every figure is printed by the script named beside it
(`benchmarks/reliability/`), which also writes `docs/benchmarks/reliability.json`; this page is made from that file.
Short forms of the trials run with `make test` (`tests/anomaly/`, `tests/server/`).

Two models: the *embedded* one (SmolLM2-135M-Instruct, fp32), and, where large counts matter and the model does not, a
*tiny* one of two layers with random weights. A *paced* core computes nothing and hands out one token a request at fixed
times.
"""
TRIALS: dict[str, tuple[str, str]] = {
    "concurrent_streams": (
        "A thousand clients at once",
        "Every client streams; each text must be the one that the same prompt gets alone at temperature 0. "
        "Wanted: all complete, all equal, the front under 1 GiB.",
    ),
    "concurrent_streams_embedded": ("The same with the embedded model", "Fewer clients. Wanted: the same."),
    "flat_memory": (
        "Many short requests",
        "Half of them streamed, all prompts different. Wanted: no failure, and both processes within 5 MiB of where "
        "they were after the warm-up.",
    ),
    "rough_clients": (
        "Rough clients",
        "Clients that leave at random moments, before, during or after their answer; readers that read nothing for "
        "seconds; connections on which a request is begun and never ended; a wall clock that leaps by days. Wanted: "
        "the pool whole, the same canary before and after.",
    ),
    "fuzz_bodies": (
        "Fuzzed bodies",
        "Mutations of good bodies of every route, damaged bytes among them. Wanted: no 5xx, no hang, no traceback.",
    ),
    "fuzz_openapi": (
        "Requests made from the server's own OpenAPI",
        "By schemathesis, for every operation. Wanted: the same.",
    ),
    "killed_core": (
        "kill -9 of the engine core",
        "Under load. Wanted: every client has a clean error at once; the front exits with 1, or with "
        "`--restart-engine` serves again.",
    ),
    "nth_failure": (
        "The n-th failure",
        "Each part fails once, at its first call, its second, and so on, under five requests of different kinds. "
        "Wanted: every request ends, whole or with a clean error; the engine goes on with a whole pool and the same "
        "canary, or ends and says so to everyone.",
    ),
    "front_latency": (
        "What the event loop adds",
        "From hearing of a step to having written the last of its tokens. `own` is the loop's work alone (CPU time of "
        "its thread, kernel included), `wall` has the machine's other work in it. Wanted: own p99 under 2 ms.",
    ),
    "throughput_share": (
        "Throughput of the server",
        "The same requests through `LLM.generate` and as streams over HTTP. Wanted: at least 95 %.",
    ),
}
SCRIPTS = {
    "concurrent_streams_embedded": "concurrent_streams",
    "throughput_share": "front_latency",
    "fuzz_openapi": "fuzz_bodies",
}
"""Trials that are printed by another's script."""


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(each)}" for key, each in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def section(name: str, record: dict[str, object]) -> str:
    title, text = TRIALS[name]
    figures = {key: value for key, value in record.items() if key not in ("setting", "machine", "load_before")}
    rows = "\n".join(f"| {key.replace('_', ' ')} | {shown(value)} |" for key, value in figures.items())
    setting = f"`benchmarks/reliability/{SCRIPTS.get(name, name)}.py`: {record['setting']}."
    where = f"On: {record['machine']}; other work on the machine before it began: load {record['load_before']}."
    return f"## {title}\n\n{text}\n\n{setting}\n\n| figure | value |\n|---|---|\n{rows}\n\n{where}\n"


def page() -> str:
    """The whole page."""
    records = json.loads(RESULTS.read_text())
    return "\n".join([HEAD, *(section(name, records[name]) for name in TRIALS if name in records)])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(page().splitlines())} lines")
