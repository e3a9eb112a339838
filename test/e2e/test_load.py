"""A server under load and with rude clients: who waits is answered, who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import socket

import pytest

pytestmark = pytest.mark.faults

REQUESTS, CONCURRENCY, ABORTED_SHARE = 2000, 256, 0.2
MAX_TOKENS = 6


async def _ask(port: int, number: int, stream: bool, leaves: bool, dice: random.Random) -> str:
    """One request over a connection of its own; what became of it in a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # Those who leave asked for much, so that there is something to abort.
    body = json.dumps(
        {
            "prompt": f"{number}+{number}=",
            "max_tokens": 400 if leaves else MAX_TOKENS,
            "ignore_eos": True,
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        if leaves:
            if stream:
                await reader.readuntil(b"data: ")
            else:
                await asyncio.sleep(dice.uniform(0, 0.5))
            return "left"
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    complete = f'"completion_tokens":{MAX_TOKENS}' in answer and (not stream or "data: [DONE]" in answer)
    return "answered" if answer.startswith("HTTP/1.1 200") and complete else f"lost: {answer[:300]}"


async def _load(port: int) -> collections.Counter[str]:
    dice, slots = random.Random(5), asyncio.Semaphore(CONCURRENCY)

    async def one(number: int, stream: bool, leaves: bool) -> str:
        async with slots:
            return await asyncio.wait_for(_ask(port, number, stream, leaves, dice), 120)

    return collections.Counter(
        await asyncio.gather(
            *(one(n, dice.random() < 0.5, n % 100 < 100 * ABORTED_SHARE) for n in range(REQUESTS))
        )
    )


def settled(server) -> bool:
    """Nothing runs, and once the prefix cache is flushed no token of the KV pool is in use."""
    state = server.info()["internal_states"][0]
    if state["num_running_reqs"] or state["num_waiting_reqs"]:
        return False
    return (
        server.post("/flush_cache").status_code == 200
        and not server.info()["internal_states"][0]["num_used_tokens"]
    )


@pytest.mark.timeout(240)
def test_of_two_thousand_requests_with_a_fifth_aborted_none_is_lost(start_server):
    server = start_server("--disable-flashinfer-autotune").wait_ready()
    outcomes = asyncio.run(_load(server.port))
    left = round(REQUESTS * ABORTED_SHARE)
    assert outcomes == {"answered": REQUESTS - left, "left": left}
    server.wait_until("the KV pool is empty", lambda: settled(server), 30)
    assert "Traceback" not in server.log
    assert server.complete("now", max_tokens=2)["choices"]


def test_slow_readers_keep_nobody_waiting(start_server):
    server = start_server("--disable-flashinfer-autotune").wait_ready()
    body = json.dumps(
        {"prompt": "a", "max_tokens": 400, "n": 32, "ignore_eos": True, "stream": True, "logprobs": 100}
    ).encode()
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    slow = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request)
        connection.recv(100)
        slow.append(connection)
    assert server.complete("hello", max_tokens=4)["choices"], "answered while four clients do not read"
    for connection in slow:
        connection.close()
    server.wait_until("the KV pool is empty", lambda: settled(server), 60)
    assert "Traceback" not in server.log


def test_clients_that_send_half_a_request_and_stay_keep_nobody_waiting(server):
    half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    staying = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for connection in staying:
        connection.sendall(half)
    assert server.complete("hello", max_tokens=4)["choices"]
    for connection in staying:
        connection.close()
    assert server.complete("hello", max_tokens=4)["choices"]
    assert "Traceback" not in server.log
