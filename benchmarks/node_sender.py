"""What a shared sender saves: `python -m benchmarks.node_sender [--ranks 8] [--seconds 30]`.

The ranks of one host, each a process with a step of 100 ms of 17 records, send once by one of them
and once each by itself, to a server that accepts everything. Shown are the requests and bytes per
second at the server, and the processor time of the hooks' background threads, by the kernel's
accounts of threads: of an ordinary rank (the median), of the rank that sends, and of all together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ._report import machine, print_table, write_json

_MICROBATCHES = 8
_WARM_UP_S = 5.0


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.node_sender", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each of both ways")
    parser.add_argument("--json", metavar="PATH", help="write the figures there as well")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return _train(*options.rank)
    ways = {"each by itself": False, "shared": True}
    results = {name: _measure(options, shares) for name, shares in ways.items()}
    print_table(
        f"{options.ranks} ranks of one host, {options.seconds:.0f} s",
        ("", "requests/s", "records/s", "KB/s", "ms/s of a rank", "of the sender", "of all"),
        [
            (
                name, f"{r['requests']:.1f}", f"{r['records']:.0f}", f"{r['bytes'] / 1e3:.1f}",
                f"{r['rank_ms']:.1f}", f"{r['sender_ms']:.1f}", f"{r['all_ms']:.1f}",
            )
            for name, r in results.items()
        ],
    )  # fmt: skip
    print(f"\n{machine()}")
    if options.json:
        write_json(options.json, {"ranks": options.ranks, **results})
    return None


def _measure(options: argparse.Namespace, shares: bool) -> dict[str, float]:
    requests: list[int] = []

    class Sink(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self.rfile.read(size)
            requests.append(size)
            self.send_response(202)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *request: object) -> None:
            """Ignore a rank that was killed in the middle of a request."""

    server = Server(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-m", "benchmarks.node_sender", "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), url, str(int(shares))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(options.ranks)
    ]  # fmt: skip
    try:
        while not all(_ask(rank)["sent"] for rank in ranks):
            time.sleep(0.1)
        time.sleep(_WARM_UP_S)
        before, first, begun_s = [_ask(rank) for rank in ranks], len(requests), time.monotonic()
        time.sleep(options.seconds)
        after, sent = [_ask(rank) for rank in ranks], requests[first:]
        seconds = time.monotonic() - begun_s
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        server.shutdown()
        server.server_close()
    spent = [(b["ns"] - a["ns"]) / 1e6 / seconds for a, b in zip(before, after, strict=True)]
    by_sends = [(each["sends"], ms) for each, ms in zip(after, spent, strict=True)]
    records = sum(b["sent"] - a["sent"] for a, b in zip(before, after, strict=True))
    return {
        "requests": len(sent) / seconds,
        "bytes": sum(sent) / seconds,
        "records": records / seconds,
        "rank_ms": statistics.median(ms for sends, ms in by_sends if not sends),
        "sender_ms": max((ms for sends, ms in by_sends if sends), default=0.0),
        "all_ms": sum(spent),
    }


def _ask(rank: subprocess.Popen[str]) -> dict[str, Any]:
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    found: dict[str, Any] = json.loads(rank.stdout.readline())
    return found


def _train(rank: str, url: str, shares: str) -> None:
    """Train as one rank, and answer each line of the standard input with the present counts."""
    import resihp

    monitor = resihp.Monitor(job="benchmark", url=url, rank=int(rank), share_sender=shares == "1")
    threading.Thread(target=_report, args=(monitor,), daemon=True).start()
    while True:
        with monitor.step():
            for _ in range(_MICROBATCHES):
                with monitor.forward(seq_lens=[1000, 2000]):
                    pass
                with monitor.backward():
                    pass
            with monitor.optimizer():
                pass
        time.sleep(0.1)


def _report(monitor: Any) -> None:
    while sys.stdin.readline():
        found = {t.name: t.native_id for t in threading.enumerate() if "resihp" in t.name}
        threads = {name: number for name, number in found.items() if number is not None}
        spent = [_spent_ns(number) for number in threads.values()]
        counts = {"sent": monitor.stats.sent, "sends": "resihp-node" in threads}
        print(json.dumps({"ns": sum(spent), **counts}), flush=True)


def _spent_ns(thread: int) -> int:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


if __name__ == "__main__":
    main()
