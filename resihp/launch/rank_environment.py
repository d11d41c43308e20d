"""Environment variables of the ranks that a launcher starts."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from resihp._preemption import FILE, SECONDS, URL
from resihp.contracts.node_memory import MEMORY_SERVERS, NODE_MEMORY, MemoryServers

from .attempts import Attempt
from .options import Options

_log = logging.getLogger("resihp.launch")
_FILES = "resihp-run-"
_UNLIMITED = 2**31 - 1  # restarts, for scripts that read the number


class RankEnvironment:
    """Variables of this node's ranks: those of torchrun, and those of ResiHP.

    launcher  name of this launcher among the nodes of an attempt
    memory    folder of the node's memory; None: there is none
    notice    file in which the ranks look for a notice that this node is taken away
    """

    def __init__(self, options: Options, launcher: str, memory: Path | None) -> None:
        self._options, self._launcher, self._memory = options, launcher, memory
        self._folders = [tempfile.TemporaryDirectory(prefix=_FILES, dir=memory)]
        self.notice = Path(self._folders[0].name) / "preemption"
        self._plan: tuple[int, Path | None] = (-1, None)

    def of_all_ranks(self) -> dict[str, str]:
        """Return the variables that the ranks have in common, in every attempt."""
        # Processes that all compute on every core slow each other down many times.
        threads = {"OMP_NUM_THREADS": "1"} if self._options.processes > 1 else {}
        # A rank that starts again gets all of its memory anew: in huge pages that is much faster.
        # Other C libraries than glibc (2.35), which asks the kernel's setting too, ignore it.
        pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        # Also without one: this launcher may run in a rank of another job.
        kept = {NODE_MEMORY: str(self._memory or ""), MEMORY_SERVERS: ""}
        notices = {FILE: str(self.notice), URL: "", SECONDS: ""}
        return {**threads, **pages, **os.environ, **kept, **notices}

    def of_one_rank(
        self,
        rank: int,
        local_rank: int,
        attempt: Attempt,
        devices: Sequence[int],
        *,
        has_copies: bool,
    ) -> dict[str, str]:
        """Return the variables of a rank, with `RESIHP_JOIN`, and `RESIHP_PLAN` after a plan.

        devices     of this node, by local rank
        has_copies  the launchers store copies of checkpoints for one another
        """
        options = self._options
        ranks = str(attempt.world_size)
        restarts = str(_UNLIMITED if options.max_restarts is None else options.max_restarts)
        file = self._plan_file(attempt) if attempt.plan else None
        plan = {} if file is None else {"RESIHP_PLAN": str(file)}
        return {
            **plan,
            **(self._memory_servers(attempt) if has_copies else {}),
            **self._visible_devices(devices),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": str(len(devices)),
            "GROUP_RANK": str(attempt.index_of(self._launcher) or 0),
            "GROUP_WORLD_SIZE": str(len(attempt.nodes)),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": ranks,
            "MASTER_ADDR": attempt.host or options.host,
            "MASTER_PORT": str(attempt.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": options.run,
            "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
            "TORCHELASTIC_MAX_RESTARTS": restarts,
            "RESIHP_JOIN": "1" if options.joins else "0",
        }

    def close(self) -> None:
        """Delete the files that the variables name."""
        for folder in self._folders:
            folder.cleanup()

    def _memory_servers(self, attempt: Attempt) -> dict[str, str]:
        """Variable with the servers of checkpoints."""
        return MemoryServers(
            token=attempt.token,
            servers=attempt.memories,
            target=attempt.copies_at(self._launcher),
            timeout_s=self._options.heartbeat.total_seconds(),
        ).to_environment()

    def _plan_file(self, attempt: Attempt) -> Path | None:
        """File with the plan that the attempt follows, the same for all ranks: in the node's
        memory, or where that is full in the system's folder of such files; None where both are."""
        if self._plan[0] != attempt.number:
            self._plan = attempt.number, self._written(f"plan-{attempt.number}.json", attempt.plan)
        return self._plan[1]

    def _written(self, name: str, text: str) -> Path | None:
        with suppress(OSError):
            return _write(self._folders[0], name, text)
        try:
            if len(self._folders) == 1:
                self._folders.append(tempfile.TemporaryDirectory(prefix=_FILES))
            return _write(self._folders[1], name, text)
        except OSError as error:
            _log.warning("no room for the plan, the ranks of this node start without it: %s", error)
            return None

    def _visible_devices(self, devices: Sequence[int]) -> dict[str, str]:
        """CUDA's variable without the devices that are left out.

        As it is where there are fewer devices than ranks: which one a rank used is not known.
        """
        if len(devices) == self._options.processes or self._options.joins:
            return {}
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is not None and not named.strip():
            return {}  # none are to be used
        processes = self._options.processes
        names = named.split(",") if named else list(map(str, range(_gpus() or processes)))
        if len(names) < processes:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in devices)}


def _gpus() -> int:
    """Number of NVIDIA devices that this node or its container has; 0 where that is not known."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _write(folder: tempfile.TemporaryDirectory[str], name: str, text: str) -> Path:
    path = Path(folder.name) / name
    path.write_text(text)
    return path
