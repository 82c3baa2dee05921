"""Many requests over a few connections that stay open."""

import asyncio
import json
from collections.abc import Sequence

REQUEST_LIMIT_S = 60.0
Answer = tuple[int, bytes]
HANG = 0
"""The status of an answer that did not come in time."""


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One response: status and body, whole or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        return status, await reader.readexactly(length)
    body = b""
    while num_bytes := int((await reader.readline()).strip(), 16):
        body += await reader.readexactly(num_bytes)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, body


def raw_request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _worker(port: int, jobs: "asyncio.Queue[tuple[int, bytes]]", answers: list[Answer]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not jobs.empty():
        index, request = jobs.get_nowait()
        try:
            writer.write(request)
            answers[index] = await asyncio.wait_for(read_answer(reader), REQUEST_LIMIT_S)
        except (asyncio.IncompleteReadError, ConnectionError):  # a server may close after it refused
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answers[index] = await asyncio.wait_for(read_answer(reader), REQUEST_LIMIT_S)
        except TimeoutError:
            answers[index] = (HANG, b"")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def _send(port: int, requests: Sequence[bytes], num_connections: int) -> list[Answer]:
    answers: list[Answer] = [(HANG, b"")] * len(requests)
    jobs: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    for job in enumerate(requests):
        jobs.put_nowait(job)
    await asyncio.gather(*(_worker(port, jobs, answers) for _ in range(num_connections)))
    return answers


def send_raw(port: int, requests: Sequence[bytes], num_connections: int = 16) -> list[Answer]:
    """Every request's answer, in order."""
    return asyncio.run(_send(port, requests, num_connections))


def send_all(port: int, bodies: Sequence[dict[str, object]], path: str = "/v1/completions") -> list[Answer]:
    """The same for JSON bodies."""
    return send_raw(port, [raw_request(path, json.dumps(body).encode()) for body in bodies])
