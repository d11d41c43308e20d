"""Start a training script on this machine; the job goes on when one of its ranks dies.

    python -m resihp.elastic.launch --nproc-per-node 4 train.py ARGUMENTS
    python -m resihp.elastic.launch --join --first-rank 4 --master HOST:PORT train.py ARGUMENTS

torchrun starts such scripts too, but ends all ranks when one dies. On several machines, give each
its `--first-rank`, and all the same `--world-size` and `--master`; the first one hosts the store.

The job ends with the launcher that hosts its store: on SIGTERM all ranks, those of other launchers
included, end after the current step; if it is killed, its ranks are killed too, and the others stop
as soon as they need the store.

Exit status: 0 if a rank completed the job and all that did not were killed by a signal or given up
by the others; otherwise that of the first rank that failed, with its last lines on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import IO

import torch.distributed as dist

from resihp.contracts import JobStoppedError

from .rendezvous import exit_status, keys
from .rendezvous.environment import store_prefix
from .rendezvous.store import announce_death, connect_store, host_store

_log = logging.getLogger("resihp.launch")
_RUN = "launch"
_CONNECT_TIMEOUT = timedelta(seconds=60)
_JOIN_TIMEOUT = timedelta(seconds=5)  # the store of a running job answers at once
_POLL_S = 0.02
_LAST_LINES = 20
"""Lines of a failed rank's stderr that are repeated at the end."""


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher; returns its exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    host, _, port = options.master.partition(":")
    is_host = options.first_rank == 0 and not options.join
    timeout = _JOIN_TIMEOUT if options.join else _CONNECT_TIMEOUT
    try:
        store = (host_store if is_host else connect_store)(host, int(port or 0), timeout)
    except JobStoppedError as error:
        _log.error("%s", error)
        return exit_status.JOB_STOPPED
    ranks = range(options.first_rank, options.first_rank + options.nproc_per_node)
    _log.info("store at %s:%d, ranks %s", host, store.port, list(ranks))
    launcher = _Launcher(dist.PrefixStore(store_prefix(_RUN, "0"), store), is_host=is_host)
    signal.signal(signal.SIGTERM, launcher.request_stop)
    command = [sys.executable, options.script, *options.rest]
    try:
        for rank in ranks:
            environment = _environment(rank, options, host, store.port)
            launcher.ranks[rank] = _RankProcess(command, environment)
        return launcher.wait()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        launcher.kill()


class _Launcher:
    """The ranks of this machine."""

    def __init__(self, store: dist.Store, *, is_host: bool) -> None:
        self._store, self._is_host = store, is_host
        self.ranks: dict[int, _RankProcess] = {}
        self._stop_requested = False

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: let the ranks end after the current step."""
        self._stop_requested = True  # the store must not be used here: it may be in use

    def wait(self) -> int:
        """Wait for the end of all ranks, announce deaths; returns the launcher's exit status."""
        codes: dict[int, int] = {}
        failed: int | None = None
        while len(codes) < len(self.ranks):
            if self._stop_requested:
                self._stop_requested = False
                self._stop()
            for rank, process in self.ranks.items():
                code = process.poll()
                if rank in codes or code is None:
                    continue
                codes[rank] = code
                if code != 0:
                    try:
                        announce_death(self._store, rank)
                    except dist.DistError as error:
                        _log.warning("the death of rank %d is not announced: %s", rank, error)
                    _log.warning("rank %d ended with %d", rank, code)
                if failed is None and code > 0 and code != exit_status.FENCED_OUT:
                    failed = rank
            time.sleep(_POLL_S)
        if failed is not None:
            _log.error(
                "rank %d failed with status %d:\n%s",
                failed,
                codes[failed],
                self.ranks[failed].last_lines(),
            )
            return codes[failed]
        return 0 if 0 in codes.values() else 1

    def kill(self) -> None:
        """Kill the ranks that have not ended."""
        for process in self.ranks.values():
            process.kill()

    def _stop(self) -> None:
        try:
            if self._is_host:
                self._store.set(keys.STOPPED, "the launcher was told to end the job")
                self._store.add(keys.SIGNAL, 1)
        finally:
            for process in self.ranks.values():
                process.terminate()


class _RankProcess:
    """The process of one rank; its stderr is passed on, and the last lines of it are kept."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        self.poll, self.kill = self._process.poll, self._process.kill
        self.terminate = self._process.terminate
        assert self._process.stderr is not None
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._reader = threading.Thread(
            target=self._pass_on, args=(self._process.stderr,), name="resihp-stderr", daemon=True
        )
        self._reader.start()

    def last_lines(self) -> str:
        """The end of the process's stderr."""
        self._reader.join(timeout=1.0)  # a child of the process may keep it open
        return b"".join(self._lines).decode(errors="replace").rstrip()

    def _pass_on(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._lines.append(line)
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec little is safe


def _die_with_parent() -> None:
    """In a new process: get SIGKILL when the launcher ends, however it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(rank: int, options: argparse.Namespace, host: str, port: int) -> dict[str, str]:
    """The variables that torchrun sets, and `RESIHP_JOIN`."""
    # Processes that all compute on every core slow each other down many times.
    threads = {"OMP_NUM_THREADS": "1"} if options.nproc_per_node > 1 else {}
    return {
        **threads,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - options.first_rank),
        "WORLD_SIZE": str(options.world_size or options.nproc_per_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": _RUN,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RESIHP_JOIN": "1" if options.join else "0",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m resihp.elastic.launch")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, help="default: the ranks of this machine")
    parser.add_argument("--master", default="127.0.0.1:0", help="HOST:PORT of the store")
    parser.add_argument("--join", action="store_true", help="join a running job")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
