"""Memory of a node that outlives its ranks: the launcher keeps it, checkpoints are put there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ._json import from_json, to_json

NODE_MEMORY = "RESIHP_NODE_MEMORY"
"""Environment variable with the folder, in tmpfs; the launcher sets it and deletes the folder."""
MEMORY_SERVERS = "RESIHP_NODE_MEMORY_PEERS"
"""Environment variable with the JSON of `MemoryServers`, where there are several nodes."""


@dataclass(frozen=True, kw_only=True)
class MemoryServers:
    """Servers in the launchers of a job.

    token      secret of the job
    servers    host and port of all of them
    target     the one that stores copies of this node's files; None: there is no other node
    timeout_s  of every wait for one of them
    """

    token: str = ""
    servers: tuple[tuple[str, int], ...] = ()
    target: tuple[str, int] | None = None
    timeout_s: float = 10.0

    @classmethod
    def of_environment(cls, variables: Mapping[str, str]) -> MemoryServers:
        """Read the launcher's variable; no servers without one."""
        text = variables.get(MEMORY_SERVERS)
        return from_json(cls, json.loads(text)) if text else cls()

    def to_environment(self) -> dict[str, str]:
        """The variable that tells ranks of these servers."""
        return {MEMORY_SERVERS: json.dumps(to_json(self))}
