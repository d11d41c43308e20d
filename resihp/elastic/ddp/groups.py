"""The groups over which replicas of a user's loop sum their gradients and count microbatches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from resihp.contracts import PeerLostError

from ..microbatches.tree_sum import Node
from ..process_groups.abortable import AbortableProcessGroup, ProcessGroupFactory, WaitClock
from ..process_groups.tree_allreduce import tree_allreduce
from ..rendezvous.membership import Rendezvous


@dataclass(frozen=True)
class ReplicaGroups:
    """`everyone` alive; the `mirrors`, one process of each replica, with the same shards; and
    over which `state` goes from one mirror to those that have none."""

    everyone: AbortableProcessGroup
    mirrors: AbortableProcessGroup
    state: AbortableProcessGroup | None = None

    @property
    def groups(self) -> tuple[AbortableProcessGroup, ...]:
        """All of them that this rank is in."""
        some = (self.everyone, self.mirrors, self.state)
        return tuple(group for group in some if group is not None)

    def sum_nodes(
        self,
        own: Sequence[Sequence[torch.Tensor]],
        like: Sequence[torch.Tensor],
        nodes_of: Sequence[Sequence[Node]],
        index: int,
        leaves: int,
    ) -> list[torch.Tensor]:
        """The sums over the replicas in the fixed order of the tree, fp32, in the shapes of `like`.

        `own` are the sums of this replica, the `index`-th, one for each of its nodes; `nodes_of`
        are the nodes of each replica.
        """
        if len(self.mirrors) == 1:
            return list(own[0])
        sizes = [tensor.numel() for tensor in like]
        flats = [torch.cat([tensor.reshape(-1) for tensor in one]) for one in own]
        flat = tree_allreduce(self.mirrors, index, flats, sum(sizes), nodes_of, leaves)
        parts = zip(flat.split(sizes), like, strict=True)
        return [part.view_as(tensor) for part, tensor in parts]


def connect_replica_groups(
    rendezvous: Rendezvous,
    members: tuple[Sequence[int], Sequence[int], Sequence[int]],
    *,
    is_starting: bool,
) -> ReplicaGroups:
    """Build the groups of `members`: everyone, mirrors, state (those without this rank are not).

    At the start of a job a peer's silence means nothing yet. Raises `PeerLostError` if the
    groups will never be complete. Building them cannot be interrupted, so it has a thread of its
    own, which is abandoned.
    """
    built: list[ReplicaGroups] = []
    failed: list[str] = []
    everyone, mirrors, state = members
    name = f"loop{rendezvous.recovery}"
    store = rendezvous.stores.borrow()
    factory = ProcessGroupFactory(
        store,
        rendezvous.rank,
        broken=rendezvous.broken,
        timeout=rendezvous.timeouts.exchange,
        connect=None if is_starting else rendezvous.timeouts.connect,
        waited=WaitClock(),
        host=rendezvous.host,
    )

    def build() -> None:
        try:
            first = factory.group(f"{name}/everyone", everyone)
            second = factory.group(f"{name}/mirrors", mirrors)
            third = factory.group(f"{name}/state", state) if factory.rank in state else None
            built.append(ReplicaGroups(first, second, third))
        except (RuntimeError, dist.DistError) as error:
            failed.append(str(error))  # without its traceback, which would keep what was built
        finally:
            rendezvous.stores.give_back(store)

    thread = threading.Thread(target=build, name="resihp-peers", daemon=True)
    thread.start()
    waited_s = 0.0
    while thread.is_alive():
        thread.join(0.01)
        waited_s += 0.01
        reason = rendezvous.broken(everyone, 0.0 if is_starting else waited_s)
        if reason is not None:
            raise PeerLostError(reason)
    if failed:
        raise PeerLostError(f"the groups could not be built: {failed[0]}")
    return built[0]
