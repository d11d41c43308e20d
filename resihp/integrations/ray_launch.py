"""Ray: `resihp run` in the bundles of a placement group, one launcher a node.

    group = ray.util.placement_group([{"CPU": 8, "GPU": 8}] * 5, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    statuses = run(["--nnodes", "3:4", "--nproc-per-node", "8", "train.py"], group)

Run as a module this is one launcher, which ends with the actor that started it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from resihp.contracts import ContractError
from resihp.launch.options import Options

__all__ = ["run"]

_log = logging.getLogger("resihp.launch")
_UNTIL_ALL_ENDED_S = 60.0
_PLACE = ("--node-rank", "--node_rank", "--rdzv-id", "--rdzv_id")


def run(
    arguments: Sequence[str], group: Any, *, variables: Mapping[str, str] | None = None
) -> dict[int, int | None]:
    """Run a job in a placement group; returns the exit status of each bundle's launcher.

    arguments  those of `resihp run`, without the place of a node; without `--nnodes` all bundles
               take part from the beginning
    group      a placement group that is ready; a bundle has what the ranks of one node use
    variables  environment of the launchers and ranks, in addition to that of Ray's workers

    A launcher whose node or actor is lost is started again once Ray has replaced the bundle; None:
    it was lost last. That of bundle 0 hosts the store, and its loss ends the job, unless
    `--rdzv-endpoint` names a store in Redis or etcd.

    Raises `ContractError` for arguments that place a node.
    """
    placing = [one for one in _options_of(arguments) if one.split("=")[0] in _PLACE]
    if placing:
        raise ContractError("arguments", f"{placing[0]}: the placement group says so")
    return _Job(import_module("ray"), arguments, group, variables or {}).run()


class _Launcher:
    """Actor in one bundle."""

    def address(self) -> str:
        """Address of this node with a port that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return f"{import_module('ray').util.get_node_ip_address()}:{port}"

    def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run the launcher; returns its exit status."""
        command = [sys.executable, "-u", "-m", __name__, str(os.getpid()), *arguments]
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


class _Job:
    """Launchers of one job, by bundle."""

    def __init__(
        self, ray: Any, arguments: Sequence[str], group: Any, variables: Mapping[str, str]
    ) -> None:
        self._ray, self._group, self._variables = ray, group, dict(variables)
        self._arguments = list(arguments)
        self._count = len(group.bundle_specs)
        self._actors = [self._placed(bundle) for bundle in range(self._count)]
        self._common = ["--rdzv-id", f"ray-{group.id.hex()}"]
        given = _options_of(arguments)
        if not _names(given, "--nnodes"):
            self._common += ["--nnodes", str(self._count)]
        self._is_host_needed = not _names(given, "--rdzv-endpoint")
        if self._is_host_needed:
            self._common += ["--rdzv-endpoint", ray.get(self._actors[0].address.remote())]

    def run(self) -> dict[int, int | None]:
        """Run all launchers until those that were started first, or instead of a lost one, end."""
        ray, statuses = self._ray, dict[int, int | None]()
        first = {self._begun(bundle): bundle for bundle in range(self._count)}
        again: dict[Any, int] = {}
        while first:
            (ended,), _ = ray.wait([*first, *again], num_returns=1)
            bundle = first.pop(ended) if ended in first else again.pop(ended)
            statuses[bundle] = self._status(ended, bundle)
            if statuses[bundle] is None and (bundle or not self._is_host_needed):
                self._actors[bundle] = self._placed(bundle)
                again[self._begun(bundle)] = bundle
        if again:
            ray.wait([*again], num_returns=len(again), timeout=_UNTIL_ALL_ENDED_S)
        for ended, bundle in again.items():
            if ray.wait([ended], timeout=0)[0]:
                statuses[bundle] = self._status(ended, bundle)
        for actor in self._actors:
            ray.kill(actor)
        return dict(sorted(statuses.items()))

    def _placed(self, bundle: int) -> Any:
        """A new actor, which has all that its bundle has."""
        strategies = import_module("ray.util.scheduling_strategies")
        others = dict(self._group.bundle_specs[bundle])
        given = {
            "num_cpus": others.pop("CPU", 0),
            "num_gpus": others.pop("GPU", 0),
            "memory": others.pop("memory", None),
            "resources": others,
        }
        where = strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        return self._ray.remote(_Launcher).options(scheduling_strategy=where, **given).remote()

    def _begun(self, bundle: int) -> Any:
        arguments = ["--node-rank", str(bundle), *self._common, *self._arguments]
        return self._actors[bundle].run.remote(arguments, self._variables)

    def _status(self, ended: Any, bundle: int) -> int | None:
        """Exit status of a launcher; None if its actor was lost."""
        try:
            return int(self._ray.get(ended))
        except self._ray.exceptions.RayError as error:
            cause = str(error).splitlines()[0]
            _log.warning("the launcher of bundle %d is lost: %s", bundle, cause)
            return None


def _options_of(arguments: Sequence[str]) -> Sequence[str]:
    """The launcher's part of a command line, without that of the script."""
    placed = ["--nnodes", "65536", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:1", *arguments]
    return arguments[: len(arguments) - len(Options.parse(placed).command.arguments)]


def _names(arguments: Sequence[str], option: str) -> bool:
    """True if an option is among the arguments, in either spelling."""
    spellings = (option, option.replace("-", "_").replace("__", "--", 1))
    return any(one.split("=")[0] in spellings for one in arguments)


if __name__ == "__main__":
    from resihp.launch.fork_server import end_with
    from resihp.launch.supervisor import main

    end_with(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
