"""The groups over which replicas of a user's loop sum their gradients and count microbatches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..worlds.comm import Group, Network, WorldBrokenError
from .ledger import MiscountError
from .ordered_sum import sum_in_order
from .tree import Node


@dataclass(frozen=True)
class Peers:
    """`everyone` alive, and the `mirrors`: one process of each replica, with the same shards."""

    everyone: Group
    mirrors: Group

    def sum_buckets(self, local: Sequence[torch.Tensor], bucket_bytes: int) -> list[torch.Tensor]:
        """The sums over the replicas, out of place, in the shapes of `local`."""
        if len(self.mirrors) == 1:
            return list(local)
        started = []
        for bucket in _buckets(local[::-1], bucket_bytes):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            started.append((bucket, flat, self.mirrors.start_all_reduce(flat)))
        total: list[torch.Tensor] = []
        for bucket, flat, work in started:
            self.mirrors.complete(work)
            parts = flat.split([tensor.numel() for tensor in bucket])
            total += [part.view_as(t) for part, t in zip(parts, bucket, strict=True)]
        return total[::-1]

    def sum_nodes(
        self,
        own: Sequence[Sequence[torch.Tensor]],
        like: Sequence[torch.Tensor],
        nodes_of: Sequence[Sequence[Node]],
        index: int,
        leaves: int,
    ) -> list[torch.Tensor]:
        """The sums over the replicas in the fixed order of the tree, in the shapes of `like`.

        `own` are the sums of this replica, the `index`-th, one for each of its nodes; `nodes_of`
        are the nodes of each replica.
        """
        if len(self.mirrors) == 1:
            return list(own[0])
        sizes = [tensor.numel() for tensor in like]
        flats = [torch.cat([tensor.reshape(-1).float() for tensor in one]) for one in own]
        flat = sum_in_order(self.mirrors, index, flats, sum(sizes), nodes_of, leaves)
        parts = zip(flat.split(sizes), like, strict=True)
        return [part.view_as(tensor).to(tensor.dtype) for part, tensor in parts]

    def start_count(
        self, losses: Mapping[int, float], microbatches: int, members: int
    ) -> tuple[torch.Tensor, dist.Work]:
        """Begin to count how often each microbatch is summed, and to gather their losses.

        Returns what `losses_of` reads once `everyone` has completed the work.
        """
        line = torch.zeros(2, microbatches, dtype=torch.float64)
        for index, loss in losses.items():
            line[0, index] = loss / members
            line[1, index] = 1.0 / members
        return line, self.everyone.start_all_reduce(line)


def losses_of(line: torch.Tensor) -> list[float]:
    """The loss of each microbatch. Raises `MiscountError` unless each is summed once."""
    if bool(((line[1] - 1.0).abs() > 1e-6).any()):
        raise MiscountError(f"microbatches do not count once: {line[1].tolist()}")
    told: list[float] = line[0].tolist()
    return told


def connect_peers(
    network: Network,
    name: str,
    everyone: Sequence[int],
    mirrors: Sequence[int],
    broken: Callable[[Sequence[int], float], str | None],
) -> Peers:
    """Build both groups. Raises `WorldBrokenError` if they will never be complete.

    Building cannot be interrupted, so it has a thread of its own, which is abandoned.
    """
    built: list[Peers] = []
    failed: list[Exception] = []

    def build() -> None:
        try:
            all_ = network.group(f"{name}/everyone", everyone)
            built.append(Peers(all_, network.group(f"{name}/mirrors", mirrors)))
        except (RuntimeError, dist.DistError) as error:
            failed.append(error)

    thread = threading.Thread(target=build, name="resihp-peers", daemon=True)
    thread.start()
    waited_s = 0.0
    while thread.is_alive():
        thread.join(0.01)
        waited_s += 0.01
        reason = broken(everyone, waited_s)
        if reason is not None:
            raise WorldBrokenError(reason)
    if failed:
        raise WorldBrokenError(f"the groups could not be built: {failed[0]}")
    return built[0]


def _buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    """In order, one type each, cut where a bucket would grow beyond `bucket_bytes`."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        added = tensor.numel() * tensor.element_size()
        fits = buckets and size + added <= bucket_bytes and buckets[-1][0].dtype == tensor.dtype
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += added
    return buckets
