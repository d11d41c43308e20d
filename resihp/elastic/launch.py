"""Start a training script on this machine, and let the job live on when one of its ranks dies.

    python -m resihp.elastic.launch --nproc-per-node 4 train.py ARGUMENTS
    python -m resihp.elastic.launch --join --first-rank 4 --master HOST:PORT train.py ARGUMENTS

torchrun starts such scripts too, but ends all ranks when one dies. On several machines, give each
its `--first-rank`, all the same `--world-size` and `--master`; the first one hosts the store.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from .rendezvous.environment import store_prefix
from .rendezvous.store import announce_death, host_store

_log = logging.getLogger("resihp.launch")
_RUN = "launch"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 if a rank came to the end, whoever was lost on the way."""
    options = _parser().parse_args(arguments)
    host, _, port = options.master.partition(":")
    hosts = options.first_rank == 0 and not options.join
    limit = timedelta(seconds=60)
    store = (
        host_store(host, int(port or 0), limit)
        if hosts
        else dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    )
    ranks = range(options.first_rank, options.first_rank + options.nproc_per_node)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    _log.info("store at %s:%d, ranks %s", host, store.port, list(ranks))
    processes = {rank: _start(rank, options, host, store.port) for rank in ranks}

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes.values():
            process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    try:
        return _watch(processes, dist.PrefixStore(store_prefix(_RUN, "0"), store))
    finally:
        for process in processes.values():
            process.kill()


def _start(rank: int, options: argparse.Namespace, host: str, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **_one_thread_each(options.nproc_per_node),
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
    return subprocess.Popen([sys.executable, options.script, *options.rest], env=environment)


def _one_thread_each(processes: int) -> dict[str, str]:
    """As under torchrun: processes that all compute on every core slow each other down many times.

    The variable that a user sets holds.
    """
    return {"OMP_NUM_THREADS": "1"} if processes > 1 else {}


def _watch(processes: dict[int, subprocess.Popen[bytes]], store: dist.Store) -> int:
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for rank, process in processes.items():
            code = process.poll()
            if rank in codes or code is None:
                continue
            codes[rank] = code
            if code != 0:
                announce_death(store, rank)
                _log.warning("rank %d ended with %d", rank, code)
        time.sleep(0.02)
    return 0 if 0 in codes.values() else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m resihp.elastic.launch")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, help="default: the ranks of this machine")
    parser.add_argument("--master", default="127.0.0.1:0", help="HOST:PORT of the store")
    parser.add_argument("--join", action="store_true", help="come into a job that is running")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
