"""Many streaming clients in one process, each a plain socket: cheap enough to leave the cores to the server.

python benchmarks/reliability/stream_client.py --port 8001 --num-clients 256 --num-tokens 200 --json FILE
"""

import argparse
import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 900.0


@dataclass
class Stream:
    """One client: what it asked, what came, and when."""

    sock: socket.socket
    pieces: list[bytes] = field(default_factory=list)
    has_ended: bool = False

    @property
    def body(self) -> bytes:
        """The response without its head and its chunks' frames."""
        raw = b"".join(self.pieces)
        head, _, rest = raw.partition(b"\r\n\r\n")
        if b"chunked" not in head.lower():
            return rest
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            num_bytes = int(size, 16)
            if num_bytes == 0:
                break
            body, rest = body + rest[:num_bytes], rest[num_bytes + 2 :]
        return body

    @property
    def status(self) -> int:
        raw = b"".join(self.pieces)
        return int(raw[9:12]) if raw[:5] == b"HTTP/" else 0

    def texts(self) -> list[str]:
        """The text of each event."""
        events = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]
        return [json.loads(event)["choices"][0].get("text") or "" for event in events]

    @property
    def is_complete(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")


def request_bytes(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def open_streams(port: int, bodies: list[dict[str, object]]) -> list[Stream]:
    """Send every request."""
    streams = []
    for body in bodies:
        sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        sock.sendall(request_bytes(body))
        sock.setblocking(False)
        streams.append(Stream(sock))
    return streams


def read_all(streams: list[Stream], timeout_s: float = TIMEOUT_S) -> None:
    """Read until every stream has ended."""
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream.sock, selectors.EVENT_READ, stream)
    num_open, deadline_s = len(streams), time.monotonic() + timeout_s
    while num_open and time.monotonic() < deadline_s:
        for key, _ in selector.select(1.0):
            try:
                data = key.data.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if data:
                key.data.pieces.append(data)
            else:
                key.data.has_ended = True
                selector.unregister(key.data.sock)
                key.data.sock.close()
                num_open -= 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-clients", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    common = {"max_tokens": arguments.num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    start_s = time.perf_counter()
    streams = open_streams(arguments.port, [{"prompt": [10 + i], **common} for i in range(arguments.num_clients)])
    read_all(streams)
    wall_s = time.perf_counter() - start_s
    num_complete = sum(stream.is_complete for stream in streams)
    report = {"num_clients": len(streams), "num_complete": num_complete, "wall_s": wall_s,
              "num_events": sum(len(stream.texts()) for stream in streams)}  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
