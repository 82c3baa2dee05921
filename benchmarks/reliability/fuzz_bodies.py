"""A hundred thousand bodies that nobody should send: never a 500, a hang, or a traceback.

    pip install -c constraints.txt -e ".[fuzz]"
    python benchmarks/reliability/fuzz_bodies.py [--num-bodies 100000] [--schemathesis-s 300]

Ours are mutations of good bodies of every route; schemathesis makes others from the server's own OpenAPI.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from quick_client import HANG, raw_request, send_raw
from serving import Served, save, served
from tiny_model import write_tiny_model

HELLO = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
GOOD: dict[str, list[dict[str, object]]] = {
    "/v1/completions": [
        {"prompt": "abc", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "logprobs": 2},
        {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, "echo": True},
        {"prompt": ["a", "b"], "max_tokens": 2, "seed": 7, "logit_bias": {"97": 5}, "presence_penalty": 0.5},
    ],
    "/v1/chat/completions": [
        {
            "messages": HELLO,
            "max_tokens": 3,
            "tools": [TOOL],
            "tool_choice": "auto",
            "top_logprobs": 1,
            "logprobs": True,
        },
        {"messages": HELLO, "max_completion_tokens": 2, "response_format": {"type": "json_object"}, "stream": True},
        {"messages": [{"role": "system", "content": "s"}, *HELLO], "max_tokens": 2, "user": "u", "priority": 1},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3, "instructions": "be brief", "store": False},
        {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2, "stream": True},
    ],
    "/v1/embeddings": [{"input": "abc", "encoding_format": "float"}, {"input": [[1, 2], [3]]}],
    "/tokenize": [{"prompt": "abc"}, {"messages": HELLO}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
NASTY: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**40, 1.5, -0.0, 1e308, 1e-320, "", "\x00",
    "a" * 3000, "\ud83d\ude00", "\u202e", "None", "1", "../../etc/passwd", "{{7*7}}", "{% for %}", "<|im_end|>",
    [], {}, [[]], [None], [{}], {"": {}}, {"a": {"b": {"c": []}}}, ["x"] * 300, [1] * 300, [-1], [10**9], [True],
    {"type": "nope"},
)  # fmt: skip
NAMES = ("nope", "", "prompt", "messages", "model", "n", "stream", "\u00e9", "stop", "tools")
FINE = frozenset({200, 400, 401, 404, 405, 408, 413, 415, 422, 429})
PATHS = tuple(GOOD)
BATCH = 2000
OPTIONS = ("--max-model-len", "64", "--max-num-seqs", "64", "--num-pages", "400", "--num-threads", "1")


def mutated(body: object, rng: random.Random) -> object:
    """One change somewhere in a value."""
    if isinstance(body, dict) and body and rng.random() < 0.8:
        copy = dict(body)
        key = rng.choice(list(copy))
        match rng.randrange(5):
            case 0:
                copy[key] = rng.choice(NASTY)
            case 1:
                del copy[key]
            case 2:
                copy[rng.choice(["nope", "", "prompt", "messages", "model", "n", "stream", "\u00e9", key + "x"])] = (
                    rng.choice(NASTY)
                )
            case _:
                copy[key] = mutated(copy[key], rng)
        return copy
    if isinstance(body, list) and body and rng.random() < 0.8:
        copy_list = list(body)
        place = rng.randrange(len(copy_list))
        copy_list[place] = mutated(copy_list[place], rng)
        return copy_list * rng.choice([1, 1, 1, 3])
    return rng.choice(NASTY)


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bytes that may not be JSON any more."""
    match rng.randrange(7):
        case 0:
            return raw[: rng.randrange(len(raw) + 1)]
        case 1:
            place = rng.randrange(len(raw) + 1)
            return raw[:place] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + raw[place:]
        case 2:
            return raw.replace(b"3", b"NaN").replace(b"2", b"-Infinity")
        case 3:
            return b"[" * rng.randrange(1, 20_000)
        case 4:
            return b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}], "input": "\\ud800"}'
        case 5:
            return b'{"a":' * rng.randrange(1, 5000) + b"1" + b"}" * rng.randrange(1, 5000)
        case _:
            return rng.randbytes(rng.randrange(200))


def request_of(rng: random.Random) -> bytes:
    """A request whose body is wrong in one to three places."""
    path = rng.choice(PATHS)
    body: object = rng.choice(GOOD[path])
    for _ in range(rng.randrange(1, 4)):
        body = mutated(body, rng)
    raw = json.dumps(body).encode()
    return raw_request(path, damaged(raw, rng) if rng.random() < 0.2 else raw)


def own_mutations(server: Served, count: int, rng: random.Random) -> tuple[Counter[int], list[str]]:
    """Send them; how often each status came, and what was wrong."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    while (num_left := count - statuses.total()) > 0:
        requests = [request_of(rng) for _ in range(min(BATCH, num_left))]
        for request, (status, answer) in zip(requests, send_raw(server.port, requests), strict=True):
            statuses[status] += 1
            has_leak = b"Traceback" in answer or b"/site-packages/" in answer or b"graphrunner/" in answer
            if status not in FINE or has_leak:
                wrong.append(f"{status} {request[:600]!r} -> {answer[:300]!r}")
        print(f"{statuses.total()} bodies: {dict(statuses)}", flush=True)
    return statuses, wrong


def from_openapi(server: Served, seconds: float) -> tuple[int, list[str]]:
    """Let schemathesis make requests for a while; how many, and what was wrong."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    num_sent = 0
    wrong: list[str] = []
    deadline_s = time.monotonic() + seconds

    def trial(operation: object) -> Callable[[], None]:
        @settings(max_examples=100, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=operation.as_strategy())  # type: ignore[attr-defined]
        def run(case: object) -> None:
            nonlocal num_sent
            if time.monotonic() > deadline_s:
                return
            answer = case.call(timeout=60)  # type: ignore[attr-defined]
            num_sent += 1
            is_fine = answer.status_code in FINE or (answer.status_code == 503 and "/health" in answer.request.url)
            if not is_fine or b"Traceback" in answer.content:
                asked = answer.request
                wrong.append(f"{answer.status_code} {asked.method} {asked.url} {asked.body!r:.300}")

        return run

    while time.monotonic() < deadline_s:
        for operation in operations:
            trial(operation)()
    return num_sent, wrong


def own_trial(server: Served, count: int, seed: int) -> None:
    """Our mutations: run, print, save."""
    canary, start_s = server.text("canary", 8), time.monotonic()
    statuses, wrong = own_mutations(server, count, random.Random(seed))
    for line in wrong[:20]:
        print("WRONG", line)
    num_tracebacks, is_whole = server.log.read_text().count("Traceback"), server.wait_idle()
    is_same = server.text("canary", 8) == canary
    save(
        "fuzz_bodies",
        f"tiny random model; seed {seed}",
        num_bodies=statuses.total(),
        by_status={str(status): number for status, number in sorted(statuses.items())},
        num_hangs=statuses[HANG],
        num_wrong=len(wrong),
        num_tracebacks_in_log=num_tracebacks,
        is_pool_whole=is_whole,
        is_canary_same=is_same,
        wall_s=round(time.monotonic() - start_s),
        holds=not wrong and not num_tracebacks and is_whole and is_same,
    )


def openapi_trial(server: Served, seconds: float) -> None:
    """Schemathesis: run, print, save."""
    num_made, wrong = from_openapi(server, seconds)
    for line in wrong[:20]:
        print("WRONG", line)
    num_tracebacks, is_whole = server.log.read_text().count("Traceback"), server.wait_idle()
    save(
        "fuzz_openapi",
        f"tiny random model; {seconds:g} s of schemathesis",
        num_requests=num_made,
        num_wrong=len(wrong),
        num_tracebacks_in_log=num_tracebacks,
        is_pool_whole=is_whole,
        holds=not wrong and not num_tracebacks and is_whole,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-bodies", type=int, default=100_000)
    parser.add_argument("--schemathesis-s", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder)))
        with served("--model", model, *OPTIONS) as server:
            if arguments.num_bodies:
                own_trial(server, arguments.num_bodies, arguments.seed)
            if arguments.schemathesis_s:
                openapi_trial(server, arguments.schemathesis_s)


if __name__ == "__main__":
    main()
