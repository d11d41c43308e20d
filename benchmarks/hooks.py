"""What the hooks cost a training step, beside TraceML: `python -m benchmarks.hooks`.

Each tool runs in a process of its own around the same training loop, one after the other, with
its receiver running in another process: for ResiHP an HTTP server that takes every message, for
TraceML its aggregator. TraceML gets a temporary virtual environment of its own, which borrows this
one's torch. Added time is the difference between steps with and without the tool, interleaved; for
TraceML, steps without are taken after its patches are in place.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._report import install, machine, peer_python, print_table, write_json

PEER = "traceml-ai==0.5.0"
_WORKER = Path(__file__).with_name("_hooks_worker.py")
_SINK = """
import http.server, sys
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_PUT = do_POST
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    import torch

    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    results = {"resihp": _measure_ours(options.seconds, device)}
    note = "TraceML left out (--no-peer)"
    if options.peer:
        try:
            results["traceml"] = _measure_peer(options.seconds, device)
            note = f"{PEER}, its aggregator running"
        except (subprocess.SubprocessError, OSError, RuntimeError) as error:
            note = f"TraceML could not be measured here: {error}"
    _show(results, device)
    print(f"\n{machine()}\nPeer: {note}")
    if options.json:
        write_json(options.json, {"device": device, "peer": note, **results})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hooks", description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the figures there as well")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="measure ours alone")
    parser.add_argument("--cpu", action="store_true", help="on the CPU even where there is CUDA")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each tool (default 60)")
    return parser.parse_args()


def _measure_ours(seconds: float, device: str) -> dict[str, Any]:
    with sink() as address:
        return _work(sys.executable, "resihp", address, seconds, device)


def _measure_peer(seconds: float, device: str) -> dict[str, Any]:
    with peer_aggregator() as (python, address):
        return _work(python, "traceml", address, seconds, device)


@contextmanager
def sink() -> Iterator[str]:
    """Run a receiver of ResiHP's messages in another process; its address."""
    with _running([sys.executable, "-c", _SINK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


@contextmanager
def peer_aggregator() -> Iterator[tuple[str, str]]:
    """Install the peer and run its aggregator; the peer's Python interpreter, and the
    aggregator's address as the workers take it."""
    with tempfile.TemporaryDirectory(prefix="resihp-peer-") as folder:
        python = peer_python(Path(folder) / "venv")
        install(python, PEER)
        port = _free_port()
        serve = [
            str(python.with_name("traceml")), "serve", "--mode", "summary", "--logs-dir", folder,
            "--run-name", "benchmark", "--aggregator-port", str(port),
        ]  # fmt: skip
        with _running(serve, stdout=subprocess.DEVNULL):
            _wait_for(port)
            yield str(python), f"127.0.0.1|{port}|benchmark|{folder}"


def _work(python: str, tool: str, address: str, seconds: float, device: str) -> dict[str, Any]:
    command = [python, str(_WORKER), tool, address, str(seconds), device]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * seconds + 240, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the worker failed"])[-1])
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    said = (done.stdout + done.stderr).splitlines()
    result["complaints"] = sum("dropping" in line for line in said)
    return result


@contextmanager
def _running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, stderr=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == os.EX_OK:
                return
        time.sleep(0.1)
    raise RuntimeError("its aggregator did not start")


_STEPS = (
    ("tiny_1", "wall", "step of 1 microbatch, 3 records"),
    ("tiny_8", "wall", "step of 8 microbatches, 17 records"),
    ("large", "wall", "step of 100 ms, 17 records"),
    ("large", "cpu", "the same, processor time"),
    ("itself", "wall", "step of 100 ms without a tool against itself"),
    ("itself", "cpu", "the same, processor time"),
)
_ALONE = (
    ("step_us", "an empty step"),
    ("microbatch_us", "a microbatch block, 8 lengths"),
    ("record_us", "record() of an engine's own times"),
)


def _show(results: dict[str, dict[str, Any]], device: str) -> None:
    ours, peer = results["resihp"], results.get("traceml")
    rows = [
        (words, *_added(ours[name], clock), *_beside(ours, peer, name, clock))
        for name, clock, words in _STEPS
    ]
    columns = ("", "ResiHP", "95% interval", "TraceML", "95% interval", "ratio")
    print_table(f"Added to a step in the training thread, µs, on {device}", columns, rows)
    large = ours["large"]
    print(
        f"Of the large step ({large['step_us'] / 1e3:.0f} ms on the wall, {large['pairs']} pairs) "
        f"that is {100 * large['wall_us'] / large['step_us']:.3f}%."
    )
    print(f"ResiHP's calls, timed in place within that step: {ours['in_place_us']:.0f} µs.")
    _show_alone(ours, peer)
    print(f"Records of ResiHP: {ours['records']}.")
    if peer is not None:
        print(f"TraceML said {peer['complaints']} times that it dropped something.")


def _show_alone(ours: dict[str, Any], peer: dict[str, Any] | None) -> None:
    other = peer["alone"] if peer is not None else {}
    rows = [(words, _cell(ours["alone"].get(name)), _cell(other.get(name)))
            for name, words in _ALONE]  # fmt: skip
    background = peer["background_us"] if peer is not None else None
    rows.append(
        ("CPU of background threads, a tiny step", _cell(ours["background_us"]), _cell(background))
    )
    print_table("Alone, in a tight loop, µs", ("", "ResiHP", "TraceML"), rows)


def _added(figures: dict[str, float], clock: str) -> tuple[str, str]:
    low, high = figures[f"{clock}_low_us"], figures[f"{clock}_high_us"]
    return _cell(figures[f"{clock}_us"]), f"{low:.1f} to {high:.1f}"


def _beside(
    ours: dict[str, Any], peer: dict[str, Any] | None, name: str, clock: str
) -> tuple[str, ...]:
    """The peer's figures and their ratio to ours, where both differ from nothing."""
    if peer is None:
        return ("-", "-", "-")
    sure = min(ours[name][f"{clock}_low_us"], peer[name][f"{clock}_low_us"]) > 0
    ratio = f"{peer[name][f'{clock}_us'] / ours[name][f'{clock}_us']:.1f}x" if sure else "-"
    return (*_added(peer[name], clock), ratio)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
