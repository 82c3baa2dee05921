"""A thousand clients stream at once; each must get what one alone gets.

    python benchmarks/reliability/concurrent_streams.py [--num-clients 1000] [--num-embedded 48]

The thousand talk to the tiny model; the same with fewer clients and the embedded one.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

from serving import MIB, save, served
from stream_client import open_streams, read_all
from tiny_model import write_tiny_model

SUBJECTS = (
    "the sea", "a fox", "winter", "bread", "the moon", "a clock", "rain", "a king", "music", "an island", "snow",
    "a bridge", "tea", "a garden", "fire", "a letter", "the wind", "a ship", "gold", "sleep",
)  # fmt: skip
LIMIT_BYTES = 1024 * MIB


def trial(name: str, what: str, num_clients: int, num_tokens: int, options: list[str]) -> None:
    """One server, all clients at once: run, print, save."""
    prompts = [f"Here is a short story about {subject}. It" for subject in SUBJECTS]
    with served(*options, "--max-num-seqs", "256") as server:
        solo = {prompt: server.text(prompt, num_tokens) for prompt in prompts[:num_clients]}
        common = {"max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        bodies = [{"prompt": prompts[i % len(prompts)], **common} for i in range(num_clients)]
        peak_bytes, is_over = [server.rss_bytes()], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.05):
                peak_bytes.append(server.rss_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start_s = time.perf_counter()
        streams = open_streams(server.port, bodies)
        read_all(streams)
        wall_s = time.perf_counter() - start_s
        is_over.set()
        watcher.join()
        texts = ["".join(stream.texts()) for stream in streams]
        num_equal = sum(text == solo[str(body["prompt"])] for text, body in zip(texts, bodies, strict=True))
        save(
            name,
            f"{what}, fp32; {len(solo)} prompts, {num_tokens} tokens each",
            num_clients=num_clients,
            num_complete=sum(stream.is_complete for stream in streams),
            num_equal_to_solo=num_equal,
            front_peak_mib=round(max(peak_bytes) / MIB),
            wall_s=round(wall_s, 1),
            is_pool_whole=server.wait_idle(),
            holds=num_equal == num_clients and max(peak_bytes) < LIMIT_BYTES,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-clients", type=int, default=1000)
    parser.add_argument("--num-embedded", type=int, default=48)
    given = parser.parse_args()
    if given.num_clients:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--model", str(write_tiny_model(Path(folder))), "--num-threads", "1"]
            trial("concurrent_streams", "tiny random model", given.num_clients, 24, options)
    if given.num_embedded:
        trial("concurrent_streams_embedded", "embedded model", given.num_embedded, 8, ["--max-model-len", "128"])


if __name__ == "__main__":
    main()
