"""A thousand clients stream at once from the embedded model; each must get what one alone gets.

python benchmarks/reliability/concurrent_streams.py [--num-clients 1000] [--num-tokens 12]
"""

import argparse
import threading
import time

from serving import MIB, save, served
from stream_client import open_streams, read_all

SUBJECTS = (
    "the sea", "a fox", "winter", "bread", "the moon", "a clock", "rain", "a king", "music", "an island", "snow",
    "a bridge", "tea", "a garden", "fire", "a letter", "the wind", "a ship", "gold", "sleep",
)  # fmt: skip
LIMIT_BYTES = 1024 * MIB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-clients", type=int, default=1000)
    parser.add_argument("--num-tokens", type=int, default=12)
    given = parser.parse_args()
    prompts = [f"Here is a short story about {subject}. It" for subject in SUBJECTS]
    with served("--max-model-len", "128", "--max-num-seqs", "256") as server:
        solo = {prompt: server.text(prompt, given.num_tokens) for prompt in prompts}
        bodies = [
            {"prompt": prompts[i % len(prompts)], "max_tokens": given.num_tokens, "temperature": 0, "stream": True,
             "ignore_eos": True}
            for i in range(given.num_clients)
        ]  # fmt: skip
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
            "concurrent_streams",
            f"embedded model, fp32; {len(prompts)} prompts, {given.num_tokens} tokens each",
            num_clients=given.num_clients,
            num_complete=sum(stream.is_complete for stream in streams),
            num_equal_to_solo=num_equal,
            front_peak_mib=round(max(peak_bytes) / MIB),
            wall_s=round(wall_s, 1),
            is_pool_whole=server.wait_idle(),
            holds=num_equal == given.num_clients and max(peak_bytes) < LIMIT_BYTES,
        )


if __name__ == "__main__":
    main()
