"""Process groups of a user's loop: all ranks, data-parallel ranks, and state transfer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from resihp.contracts import PeerLostError

from ..process_groups.abortable import AbortableProcessGroup, WaitClock
from ..rendezvous.membership import Rendezvous


@dataclass(frozen=True)
class ReplicaGroups:
    """Process groups of one rank.

    everyone       all ranks alive
    data_parallel  one rank of each replica alive, all with the same shards
    state          the source of the state and the ranks without it; None where this rank is neither
    """

    everyone: AbortableProcessGroup
    data_parallel: AbortableProcessGroup
    state: AbortableProcessGroup | None = None

    @property
    def groups(self) -> tuple[AbortableProcessGroup, ...]:
        """All groups of this rank."""
        some = (self.everyone, self.data_parallel, self.state)
        return tuple(group for group in some if group is not None)


def connect_replica_groups(
    rendezvous: Rendezvous,
    members: tuple[Sequence[int], Sequence[int], Sequence[int]],
    *,
    is_starting: bool,
) -> ReplicaGroups:
    """Build the groups of `members` (everyone, data-parallel, state) that contain this rank.

    At the start of a job a peer that has not come yet does not count as lost. Building a group
    cannot be interrupted: it runs in a thread that is abandoned when `PeerLostError` is raised.
    """
    built: list[ReplicaGroups] = []
    failed: list[str] = []
    everyone, data_parallel, state = members
    name = f"loop{rendezvous.recovery}"
    timeouts = rendezvous.timeouts
    connect = timeouts.exchange if is_starting else timeouts.connect

    def build() -> None:
        try:
            with rendezvous.group_factory(WaitClock(), connect=connect) as factory:
                first = factory.group(f"{name}/everyone", everyone)
                second = factory.group(f"{name}/data_parallel", data_parallel)
                third = factory.group(f"{name}/state", state) if factory.rank in state else None
            built.append(ReplicaGroups(first, second, third))
        except (RuntimeError, dist.DistError) as error:
            failed.append(str(error))  # its traceback would keep the groups alive

    thread = threading.Thread(target=build, name="resihp-replica-groups", daemon=True)
    thread.start()
    rendezvous.join(thread, everyone, is_starting=is_starting)
    if failed:
        raise PeerLostError(f"the groups could not be built: {failed[0]}")
    return built[0]
