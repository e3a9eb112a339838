"""Ten minutes of mixed traffic against a fresh server, and what its memory does meanwhile. Run by hand:

    python test/soak.py [--minutes 10] [-- FLAGS OF sglang serve]

Prints the resident memory of all server processes every half minute and, at the end, its growth per minute after the
first third as a share. Exits with 1 when that is 1% or more, when a request was lost, or when work was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "python"))

CONCURRENCY = 16
MAX_GROWTH_PER_MIN = 0.01


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("serve_flags", nargs="*", default=["--device", "cpu"], metavar="FLAGS")
    return parser.parse_args()


def rss_mib(pid: int) -> float:
    """Resident memory of a process and all below it."""
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in children.read_text().split()]
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def http(
    port: int, method: str, path: str, body: object = None, leave: bool = False
) -> tuple[int, bytes]:
    """Status and raw answer; with ``leave`` the connection is closed at the first byte of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        answer = await (reader.read(1) if leave else reader.read())
    finally:
        writer.close()
    return (0 if leave else int(answer.split(b" ", 2)[1])), answer


class Traffic:
    """Short and long, plain and streamed, with copies, stops, log-probabilities, chats, mistakes and aborts."""

    def __init__(self, port: int) -> None:
        self.port, self.dice, self.sent, self.lost = port, random.Random(1), 0, []

    async def run(self, until_s: float) -> None:
        await asyncio.gather(*(self._client(until_s) for _ in range(CONCURRENCY)))

    async def _client(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            path, body, wanted, leave = self._request()
            status, answer = await asyncio.wait_for(http(self.port, "POST", path, body, leave), 120)
            self.sent += 1
            if not leave and status != wanted:
                self.lost.append(answer[:300])

    def _request(self) -> tuple[str, dict, int, bool]:
        dice = self.dice
        prompt = "".join(
            f"{dice.randrange(100)}+{dice.randrange(100)}=\n" for _ in range(dice.randrange(1, 20))
        )
        sampling = {"temperature": dice.choice([0, 1.0]), "max_tokens": dice.randrange(1, 64)}
        body = {"prompt": prompt, **sampling, "stream": dice.random() < 0.5}
        kind = dice.randrange(10)
        if kind == 0:
            return "/v1/completions", {**body, "temperature": -1}, 400, False
        if kind == 1:
            return (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": prompt}], **sampling},
                200,
                False,
            )
        if kind == 2:
            return "/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 8}}, 200, False
        if kind == 3:
            return (
                "/v1/completions",
                {**body, "n": 4, "stop": ["7"], "logprobs": 5, "temperature": 1.0},
                200,
                False,
            )
        return "/v1/completions", body, 200, kind in (4, 5)


async def soak(process: subprocess.Popen[bytes], port: int, minutes: float) -> int:
    while True:
        try:
            if (await http(port, "GET", "/health"))[0] == 200:
                break
        except OSError:
            assert process.poll() is None, "the server ended"
        await asyncio.sleep(0.2)
    traffic, began = Traffic(port), time.monotonic()
    work = asyncio.ensure_future(traffic.run(began + 60 * minutes))
    samples: list[tuple[float, float]] = []
    while not work.done():
        await asyncio.wait([work], timeout=5)
        samples.append(((time.monotonic() - began) / 60, rss_mib(process.pid)))
        if len(samples) % 6 == 0:
            print(
                f"{samples[-1][0]:5.1f} min  {samples[-1][1]:8.1f} MiB  {traffic.sent} requests", flush=True
            )
    await work
    await asyncio.sleep(1)
    info = json.loads((await http(port, "GET", "/server_info"))[1].split(b"\r\n\r\n", 1)[1])
    await http(port, "POST", "/flush_cache")
    late = [(t, m) for t, m in samples if t > minutes / 3]
    mean_t, mean_m = (sum(column) / len(late) for column in zip(*late, strict=True))
    slope = sum((t - mean_t) * (m - mean_m) for t, m in late) / sum((t - mean_t) ** 2 for t, _ in late)
    growth, state = slope / mean_m, info["internal_states"][0]
    busy = state["num_running_reqs"] + state["num_waiting_reqs"]
    print(f"{traffic.sent} requests, {len(traffic.lost)} lost, {busy} left running")
    print(
        f"memory {samples[0][1]:.0f} -> {samples[-1][1]:.0f} MiB; {100 * growth:+.3f}% per minute after warm-up"
    )
    for answer in traffic.lost[:5]:
        print("lost:", answer)
    return int(growth >= MAX_GROWTH_PER_MIN or bool(traffic.lost) or bool(busy))


def main() -> int:
    from sglang.srt.utils.network import free_port

    options, port = parse(), free_port()
    with (
        tempfile.TemporaryDirectory(prefix="sglang-soak-") as directory,
        open(f"{directory}/log", "wb") as log,
    ):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), "SGLANG_CACHE_DIR": directory}
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.cli.main", "serve", "--port", str(port), *options.serve_flags],
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            code = asyncio.run(soak(process, port, options.minutes))
        finally:
            process.terminate()
            process.wait(30)
        if b"Traceback" in Path(log.name).read_bytes():
            print(Path(log.name).read_text()[-4000:])
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
