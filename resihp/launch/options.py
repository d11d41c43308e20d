"""Options of `resihp run`: those of torchrun, of which some have no meaning here."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import get_importer
from typing import Any

from .cluster_environment import is_this_machine, node_placement
from .store_url import StoreUrl, is_store_url, parse_address

_log = logging.getLogger("resihp.launch")

_WITHOUT_MEANING = {
    "--rdzv-backend": "nodes meet where --rdzv-endpoint says",
    "--rdzv-conf": "nodes meet where --rdzv-endpoint says",
    "--monitor-interval": "ends of processes are noticed at once",
    "--start-method": "ranks are forked from a process that has imported torch",
    "--event-log-handler": "there is no event log",
    "--logs-specs": "there are no plugins for logs",
    "--local-addr": "the address is that of the route to node 0",
    "--role": "there is one role",
    "--signals-to-handle": "SIGTERM, SIGUSR1 and SIGUSR2 are notices that the node is taken away",
}
_FLAGS = ("--standalone", "--reads-plan", "--module", "--no-python")
DEFAULT_PORT = 29500
NO_RUN = "none"
"""Identity of a job that was given none, as torchrun's."""
_MOST_SECONDS = 1e9  # time-outs that follow from these are still ones that Python can wait for


@dataclass(frozen=True)
class Command:
    """Command line of a rank.

    target     path of a script, or of a folder or an archive with a `__main__.py`; name of a
               module; or a program
    kind       "script", "module" or "program"
    arguments  command line after the target
    """

    target: str
    kind: str
    arguments: tuple[str, ...] = ()

    @property
    def refusal(self) -> str | None:
        """Reason for which it cannot be started on this node, or None."""
        if self.is_container:
            found = PathFinder.find_spec("__main__", [self.target])
            return None if found is not None else f"{self.target}: no __main__.py in it"
        if self.kind == "script":
            return None if Path(self.target).is_file() else f"{self.target}: no such file"
        if self.kind == "program":
            return None if shutil.which(self.target) else f"{self.target}: no such program"
        package = self.target.partition(".")[0]
        return None if _is_module(package) else f"{package}: no such module"

    @property
    def is_container(self) -> bool:
        """True if the target is a folder or an archive, which Python puts on its path to run the
        `__main__` in it."""
        return self.kind == "script" and get_importer(self.target) is not None


def _is_module(name: str) -> bool:
    """True if a module is in the current folder or on the path; `__main__` is the launcher's."""
    try:
        found = PathFinder.find_spec(name, [os.getcwd()]) or find_spec(name)
    except ValueError:  # an empty name
        return False
    return found is not None and name != "__main__"


@dataclass(frozen=True)
class Output:
    """Output of ranks: shown on the launcher's streams, written to files, or both.

    folder     of the files; None: there are none
    redirects  streams of a local rank that go to files alone, as torchrun's digits: 1 stdout,
               2 stderr, 3 both; the key None holds for ranks that are not named
    tee        streams that go to files and to the launcher's streams, also if `redirects` has them
    shown      local ranks whose streams are shown; None: all
    """

    folder: Path | None = None
    redirects: dict[int | None, int] | None = None
    tee: dict[int | None, int] | None = None
    shown: frozenset[int] | None = None

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """True if stream 1 or 2 of a rank appears on the launcher's."""
        if self.shown is not None and local_rank not in self.shown:
            return False
        hidden = _digit(self.redirects, local_rank) & ~_digit(self.tee, local_rank)
        return not hidden & stream

    def is_written(self, local_rank: int, stream: int) -> bool:
        """True if stream 1 or 2 of a rank goes to a file."""
        digits = _digit(self.redirects, local_rank) | _digit(self.tee, local_rank)
        return self.folder is not None and bool(digits & stream)


def _digit(given: dict[int | None, int] | None, local_rank: int) -> int:
    return 0 if given is None else given.get(local_rank, given.get(None, 0))


@dataclass(frozen=True)
class Options:
    """Options of one launcher.

    nodes         launchers of the job, one a node; further ones are standbys
    least_nodes   nodes with which the job begins and goes on
    node          index of this one; node 0 hosts the store, others may have one in common
    processes     ranks of this node
    least         ranks with which this node goes on when devices fail
    host, port    of the store, of the first server if it has several; port 0: a free one
    store_url     of the store in Redis or etcd; None: node 0 hosts it
    run           identity of the job, in its store and its folders
    max_restarts  limit of restarts of all ranks; None: as long as they help
    joins         ranks that join a running job; empty: this launcher starts the job
    heartbeat     silence of a launcher after which its node counts as lost; all other time-outs
                  between launchers follow from it
    shutdown_s    seconds for ranks to end after their step before they are killed
    reads_plans   the script takes layout and quotas from the file that RESIHP_PLAN names
    preemption_file, preemption_url
                  where a notice appears before this node is taken away
    preemption_s  seconds that a notice leaves which names no time; None: not known
    """

    command: Command
    nodes: int = 1
    least_nodes: int = 1
    node: int = 0
    processes: int = 1
    least: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    store_url: str | None = None
    run: str = NO_RUN
    max_restarts: int | None = None
    joins: tuple[int, ...] = ()
    heartbeat: timedelta = timedelta(seconds=10)
    shutdown_s: float = 30.0
    reads_plans: bool = False
    preemption_file: Path | None = None
    preemption_url: str | None = None
    preemption_s: float | None = None
    output: Output = Output()

    @property
    def outlives_nodes(self) -> bool:
        """True if the store is lost with no node: any launcher may decide."""
        return self.store_url is not None

    @property
    def connect(self) -> timedelta:
        """Time-out for the store: short for that of a running job, which answers at once."""
        return self.heartbeat / 2 if self.joins else 6 * self.heartbeat

    @property
    def arrival_s(self) -> float:
        """Time within which `least_nodes` have to come."""
        return 60 * self.heartbeat.total_seconds()

    @property
    def last_call_s(self) -> float:
        """Time for which the first attempt waits for more nodes than it needs."""
        return 6 * self.heartbeat.total_seconds()

    @property
    def poll_s(self) -> float:
        """Interval at which a launcher reads the store: longer where many do."""
        return max(0.1, self.nodes / 1000)

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Options:
        """Parse a command line. Ends the process with status 2 and one line if it is not valid."""
        parser = _parser()
        given = parser.parse_args(arguments)
        for option, reason in _WITHOUT_MEANING.items():
            if getattr(given, _name(option)) is not None:
                _log.info("%s has no meaning here: %s", option, reason)
        try:
            for flag in _FLAGS:
                setattr(given, _name(flag), _is_set(flag, getattr(given, _name(flag))))
            _place(given)
            return _options(given)
        except ValueError as error:
            parser.error(str(error))


def _place(given: argparse.Namespace) -> None:
    """Fill in what the command line leaves out: from the cluster's environment, else the defaults
    of one node. An option for the store's address also says that nodes are placed by hand."""
    by_hand = given.standalone or given.join or given.node_rank or given.master_addr
    placement = None if by_hand else node_placement(os.environ)
    if placement is not None:
        nodes = placement.nodes if given.nnodes is None else given.nnodes
        if nodes is not None and str(nodes) != "1":
            given.nnodes, given.node_rank = str(nodes), str(placement.node)
            given.rdzv_id = given.rdzv_id or placement.run
            if not given.rdzv_endpoint and placement.host:
                given.rdzv_endpoint = placement.host
                given.master_port = given.master_port or placement.port
    given.nnodes = given.nnodes or "1"


def _options(given: argparse.Namespace) -> Options:
    least_nodes, nodes = _range_of("--nnodes", given.nnodes, lambda most: most)
    node = _number("--node-rank", given.node_rank or "0", least=0)
    if node >= nodes and least_nodes == nodes == 1:
        raise ValueError(f"--node-rank {node} must be below --nnodes {nodes}")
    endpoint = f"{given.master_addr}:{given.master_port or ''}" if given.master_addr else ""
    endpoint = given.rdzv_endpoint or endpoint or "127.0.0.1"
    if given.standalone:
        endpoint = "127.0.0.1:0"
    store_url = endpoint if is_store_url(endpoint) else None
    if store_url is None:
        default_port = DEFAULT_PORT if nodes > 1 or given.join else 0
        host, port = parse_address(endpoint, given.master_port or default_port)
    elif given.rdzv_id:
        host, port = StoreUrl.parse(store_url).servers[0]
    else:
        raise ValueError("a store in Redis or etcd needs the job's identity: --rdzv-id ID")
    if nodes > 1 and not (given.node_rank or given.join or store_url or is_this_machine(host)):
        _log.info("no --node-rank, and %s is no address of this machine: it is not node 0", host)
        node = 1  # nodes that have one in common are ordered by arrival
    if node and port == 0:
        raise ValueError("several nodes need the port of the store: --rdzv-endpoint HOST:PORT")
    least, processes = _range_of("--nproc-per-node", given.nproc_per_node, _processes)
    kind = "module" if given.module else "program" if given.no_python else "script"
    restarts, window = given.max_restarts, given.preemption_seconds
    return Options(
        command=Command(given.script, kind, tuple(given.arguments)),
        nodes=nodes,
        least_nodes=least_nodes,
        node=node,
        processes=processes,
        least=least,
        host=host,
        port=port,
        store_url=store_url,
        run=given.rdzv_id or NO_RUN,
        max_restarts=None if restarts is None else _number("--max-restarts", restarts, least=0),
        joins=_joins(given.join),
        heartbeat=timedelta(seconds=_seconds("--heartbeat", given.heartbeat)),
        shutdown_s=_seconds("--shutdown-timeout", given.shutdown_timeout),
        reads_plans=given.reads_plan,
        preemption_file=Path(given.preemption_file) if given.preemption_file else None,
        preemption_url=given.preemption_url,
        preemption_s=window and _seconds("--preemption-seconds", window),
        output=_output(given),
    )


def _range_of(name: str, given: str, read: Callable[[str], int | str]) -> tuple[int, int]:
    """Both ends of MIN:MAX, or twice a single number."""
    fewest, _, most = given.rpartition(":")
    highest = _number(name, read(most), least=1)
    lowest = _number(name, fewest, least=1) if fewest else highest
    if lowest > highest:
        raise ValueError(f"{name} {given} must rise")
    return lowest, highest


def _output(given: argparse.Namespace) -> Output:
    redirects, tee = _streams(given.redirects), _streams(given.tee)
    folder = Path(given.log_dir) if given.log_dir else None
    if folder is None and (redirects or any((tee or {}).values())):
        folder = Path("logs")
    if folder is not None:
        parts = [part for part in (given.rdzv_id or "").split("/") if part not in ("", ".", "..")]
        folder /= f"{'/'.join(parts) or NO_RUN}_{uuid.uuid4().hex[:8]}"
    shown = given.local_ranks_filter
    return Output(
        folder,
        redirects,
        tee,
        frozenset(_number("--local-ranks-filter", rank, least=0) for rank in _parts(shown))
        if shown
        else None,
    )


def _joins(given: str | None) -> tuple[int, ...]:
    """Ranks that join; a variable that is empty by mistake must not start a job of its own."""
    ranks = tuple(_number("--join", rank, least=0) for rank in _parts(given))
    if given is not None and (not ranks or len(set(ranks)) < len(ranks)):
        raise ValueError(f"--join {given} must name ranks, each once")
    return ranks


def _streams(given: str | None) -> dict[int | None, int] | None:
    """Streams by local rank, from `3` or `0:3,1:1`."""
    if given is None:
        return None
    found: dict[int | None, int] = {}
    for part in _parts(given):
        rank, colon, digit = part.rpartition(":")
        if digit not in ("0", "1", "2", "3"):
            raise ValueError(f"streams are 0, 1, 2 or 3, or RANK:STREAMS,..., not {given!r}")
        found[_number("rank", rank, least=0) if colon else None] = int(digit)
    return found


def _parts(given: str | None) -> list[str]:
    return [part.strip() for part in (given or "").split(",") if part.strip()]


def _processes(given: str) -> int:
    if given in ("gpu", "auto"):
        import torch

        count = torch.cuda.device_count()
        if count or given == "gpu":
            if not count:
                raise ValueError("--nproc-per-node gpu: there is no CUDA device")
            return count
    if given in ("cpu", "auto"):
        return os.cpu_count() or 1
    return _number("--nproc-per-node", given, least=1)


def _number(name: str, given: Any, *, least: int) -> int:
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a number of at least {least}, not {given!r}")
    return number


def _is_set(name: str, given: Any) -> bool:
    """Return whether a flag is given: on the command line, or as a number other than 0."""
    return given is True or _number(f"PET_{_name(name).upper()}", given or 0, least=0) > 0


def _seconds(name: str, given: Any) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"{name} must be a number of seconds above 0, not {given!r}")
    return seconds


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    """The parser. As with torchrun, an option may be written with underscores, and its default
    may stand in the variable PET_NAME."""
    parser = argparse.ArgumentParser(
        prog="resihp run",
        description="Start a training job on this node, as torchrun does. It goes on when a rank "
        "is lost: in the same step where the script can, else by a restart from warm processes.",
        allow_abbrev=False,
    )

    def add(option: str, *short: str, default: Any = None, **settings: Any) -> None:
        name = _name(option)
        spellings = dict.fromkeys((*short, option, f"--{name}"))
        default = os.environ.get(f"PET_{name.upper()}", default)
        parser.add_argument(*spellings, dest=name, default=default, **settings)

    add(
        "--nnodes",
        help="nodes of the job, one launcher each; MIN:MAX to go on without those that are lost; "
        "default those of the Slurm step, else 1",
    )
    add(
        "--nproc-per-node",
        default="1",
        help="ranks of this node: a number, gpu, cpu or auto; "
        "MIN:MAX to restart with fewer when a device fails",
    )
    add(
        "--node-rank",
        help="index of this node; default by Slurm or by Kubernetes, else 0 where the store's "
        "address is one of this machine",
    )
    add(
        "--rdzv-endpoint",
        help="HOST:PORT of the store, which node 0 hosts; or one that the loss of no node takes "
        "away: redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,.../MASTER/DB, "
        "redis+cluster://HOST:PORT,..., etcd://HOST:PORT,...",
    )
    add("--master-addr", help="the host of it")
    add("--master-port", help="the port of it; default 29500 for several nodes, else a free one")
    add("--standalone", action="store_true", help="one node, a free port")
    add("--rdzv-id", help="identity of the job; default that of its store, else none")
    add(
        "--max-restarts",
        help="limit of restarts of all ranks; default: until the same error comes twice without a "
        "newer checkpoint, or three in a row without progress",
    )
    add("--join", metavar="RANKS", help="join a running job as these ranks, such as 2 or 2,3")
    add(
        "--heartbeat",
        metavar="SECONDS",
        default="10",
        help="silence after which a node is lost; other time-outs between nodes follow from it",
    )
    shutdown = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    add(
        "--shutdown-timeout",
        metavar="SECONDS",
        default=shutdown,
        help="for ranks that are told to end after their step; they are killed then",
    )
    add("--reads-plan", action="store_true", help="the script reads the file RESIHP_PLAN")
    add("--preemption-file", metavar="PATH", help="a notice that this node is taken away")
    add("--preemption-url", metavar="URL", help="address that answers 200 with such a notice")
    add(
        "--preemption-seconds",
        metavar="SECONDS",
        help="time that a signal leaves, or another notice without a time; default: not known",
    )
    add("--log-dir", help="folder of the ranks' output")
    add("--redirects", "-r", help="streams that go to files alone: 1, 2, 3, or RANK:STREAMS,...")
    add("--tee", "-t", help="streams that go to files too")
    add("--local-ranks-filter", help="show the output of these local ranks only")
    for option in _WITHOUT_MEANING:
        add(option, help=argparse.SUPPRESS)
    add("--module", "-m", action="store_true", help="the script is a module, as in python -m")
    add("--no-python", action="store_true", help="the script is a program of any kind")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER).required = False
    return parser
