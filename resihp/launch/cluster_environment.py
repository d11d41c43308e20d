"""Place of a launcher in its job, from the environment of Slurm and of Kubernetes.

Each starts one launcher a node: `srun --ntasks-per-node=1 resihp run ...`, an indexed Job, a
JobSet. Kubeflow's and torchrun's own variables (`PET_NNODES`, ...) are defaults of the options.
Elsewhere the store's address tells which launcher is that of node 0.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Range of the ports of stores: jobs that share nodes get different ones by their number."""


@dataclass(frozen=True)
class NodePlacement:
    """Place of this launcher; None where the environment does not tell.

    node   index of this launcher's node
    nodes  number of launchers
    host   address of node 0
    port   of the store that node 0 hosts
    run    identity of the job
    """

    node: int
    nodes: int | None = None
    host: str | None = None
    port: int | None = None
    run: str | None = None


def node_placement(
    environment: Mapping[str, str], host_name: str | None = None
) -> NodePlacement | None:
    """Return the place of this launcher; None outside of Slurm's steps and of indexed Jobs.

    host_name  full name of this host; None: asked for where it is needed, as a name server may be
               slow

    Raises `ValueError` where several launchers of one node were started.

    >>> node_placement({"JOB_COMPLETION_INDEX": "2"}, "train-2.workers.ns.svc.cluster.local").host
    'train-0.workers.ns.svc.cluster.local'
    """
    if "SLURM_STEP_ID" in environment and "SLURM_NODEID" in environment:
        return _of_slurm(environment)
    if environment.get("JOB_COMPLETION_INDEX", "").isdigit():
        return _of_indexed_job(environment["JOB_COMPLETION_INDEX"], host_name or socket.getfqdn())
    return None


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address is one of this machine; False if nobody knows it.

    >>> is_this_machine("127.0.0.1"), is_this_machine("192.0.2.1")
    (True, False)
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def first_host(node_list: str) -> str:
    """Return the first host of a list in Slurm's notation.

    >>> first_host("gpu[007-012,020],cpu3"), first_host("r[1,3]n[08-09]"), first_host("a,b")
    ('gpu007', 'r1n08', 'a')
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    assert first is not None  # an empty match at least
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _of_slurm(environment: Mapping[str, str]) -> NodePlacement:
    """Place of a task of a step, of which each node has one (variables of srun)."""
    nodes = _count(environment, "SLURM_STEP_NUM_NODES")
    tasks = _count(environment, "SLURM_STEP_NUM_TASKS")
    if nodes is not None and tasks is not None and tasks > nodes:
        raise ValueError(
            f"Slurm started {tasks} launchers on {nodes} node{'s' * (nodes > 1)}: start one a "
            "node, which starts all its ranks, with srun --ntasks-per-node=1"
        )
    job = environment.get("SLURM_JOB_ID", "")
    return NodePlacement(
        node=int(environment["SLURM_NODEID"]),
        nodes=nodes,
        host=first_host(environment.get("SLURM_STEP_NODELIST", "")) or None,
        port=_FIRST_PORT + int(job) % _PORTS if job.isdigit() else None,
        run=f"{job}.{environment['SLURM_STEP_ID']}" if job else None,
    )


def _of_indexed_job(index: str, host_name: str) -> NodePlacement:
    """Place of a pod of an indexed Job, which may be that of a JobSet: the host's name ends with
    the pod's index, and a headless service makes it known. The number of pods is in no variable.
    """
    host, dot, domain = host_name.partition(".")
    name = host.removesuffix(f"-{index}")
    return NodePlacement(
        node=int(index),
        host=f"{name}-0{dot}{domain}" if name != host else None,
        run=name if name != host else None,
    )


def _count(environment: Mapping[str, str], name: str) -> int | None:
    given = environment.get(name, "")
    return int(given) if given.isdigit() else None
