"""Recovery inside a step for a training loop of your own: DDP, FSDP2 or HSDP, one model a replica.

A replica is whatever computes gradients of the whole model by itself: one process, or several
with FSDP2 or tensor parallelism among them. ResiHP sums the gradients over the replicas, and hands
out the microbatches: each replica its quota, and after a loss the lost share to the survivors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from resihp.contracts import ContractError, Layout, Plan, Replica, Stage, even_quotas

from ..membership.agreement import Decision, Report
from ..membership.rendezvous import FencedOutError, Rendezvous
from ..membership.store import Timeouts
from ..worlds.comm import Network, WaitClock, WorldBrokenError
from .ledger import Holding, Kept, indices, spans
from .peers import Peers, connect_peers, losses_of
from .shares import Share, full_shares, rest_shares
from .tree import Node, nodes, put
from .user_loop import Seat, Step

__all__ = ["Quotas", "Replicas", "Seat", "Step"]

Quotas = Callable[[Sequence[int]], Sequence[int]]
"""Microbatches of each of the given replicas, in their order; the sum never changes."""


class Replicas:
    """Hands out microbatches and sums gradients over the replicas that are alive.

    Every process makes one with the same arguments but its own seat, before the first step and
    with equal parameters on all replicas. The store must outlive any replica. A process whose
    replica loses another one of its members gets `FencedOutError`: it ends, the others go on.

    deterministic  sum gradients in an order fixed by microbatch index, so that a loss changes no
                   bit of the training; holds about log2(quota) gradients more
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        seat: Seat,
        parameters: Iterable[torch.nn.Parameter],
        *,
        microbatches: int,
        quotas: Quotas | None = None,
        timeouts: Timeouts | None = None,
        bucket_bytes: int = 25 << 20,
        deterministic: bool = False,
    ) -> None:
        self.seat, self.completed, self.recoveries = seat, 0, 0
        self.parameters = [p for p in parameters if p.requires_grad]
        self._microbatches = microbatches
        self._quotas = quotas or (lambda alive: even_quotas(microbatches, len(alive)))
        self._bucket_bytes, self._is_ordered = bucket_bytes, deterministic
        timeouts = timeouts or Timeouts()
        every = range(seat.replicas * seat.members)
        self._rendezvous = Rendezvous(open_store, seat.rank, every, timeouts)
        self._alive = list(range(seat.replicas))
        self._plan = self._new_plan()
        self._shares = full_shares(self._plan)
        self._peers: Peers | None = None
        self._old: list[Peers] = []
        self._committed: tuple[int, float] | None = None
        self._total: list[torch.Tensor] | None = None
        self._losses: list[float] = []
        self._held: dict[Node, list[torch.Tensor]] = {}

    @property
    def alive(self) -> tuple[int, ...]:
        """The replicas that still take part."""
        return tuple(self._alive)

    def steps(self, count: int) -> Iterator[Step]:
        """Steps up to `count` completed ones, each to be iterated to its end."""
        self._rendezvous.start()
        try:
            self._connect(is_starting=True)
            while self.completed < count:
                step = Step(self.completed, iter(()))
                step.microbatches = self._work(step)
                yield step
                if self.completed == step.number:
                    raise ContractError("step", "not all of its microbatches were taken")
            self._rendezvous.finish(len(self._alive) * self.seat.members)
        finally:
            self._rendezvous.close()

    # One step.

    def _work(self, step: Step) -> Iterator[int]:
        """The microbatches of this replica, and what it redoes of others."""
        self._total, self._held = None, {}
        for parameter in self.parameters:
            parameter.grad = None
        broken: str | None = None
        while broken is not None or self.completed == step.number:
            try:
                if broken is not None:
                    self._recover(broken, step)
                    broken = None
                for index in self._todo(step):
                    yield index
                    if self._is_ordered:
                        self._put_away(index)
                    step.reported.setdefault(index, 0.0)
                if self.completed == step.number:
                    self._reduce(step)
            except WorldBrokenError as error:
                broken = str(error)

    def _todo(self, step: Step) -> list[int]:
        return [index for index in self._share.todo if index not in step.reported]

    @property
    def _share(self) -> Share:
        return self._shares[self._alive.index(self.seat.replica)]

    def _reduce(self, step: Step) -> None:
        """Sum out of place; the last exchange tells all that all hold whole sums."""
        peers = self._peers
        assert peers is not None
        line, counting = peers.start_count(step.reported, self._microbatches, self.seat.members)
        if self._is_ordered:
            total = self._sum_in_order(peers)
        else:
            total = peers.sum_buckets(_local(self.parameters), self._bucket_bytes)
        peers.everyone.complete(counting)
        self._losses, self._total = losses_of(line), total
        self._vote(peers)
        self._complete(step)

    def _vote(self, peers: Peers) -> None:
        peers.everyone.all_reduce(torch.ones(1))

    def _put_away(self, microbatch: int) -> None:
        """Add one microbatch's gradients to the nodes of the tree, and make room for the next."""
        gradients = _local(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        node = (microbatch, microbatch + 1)
        put(self._held, node, gradients, self._microbatches, _added)

    def _sum_in_order(self, peers: Peers) -> list[torch.Tensor]:
        leaves = self._microbatches
        nodes_of = [nodes(indices(share.whole), leaves) for share in self._shares]
        own = [gradients for _, gradients in sorted(self._held.items(), key=lambda item: item[0])]
        index = self._alive.index(self.seat.replica)
        return peers.sum_nodes(own, _local(self.parameters), nodes_of, index, leaves)

    def _complete(self, step: Step) -> None:
        """Put the whole sums in place of this replica's own."""
        assert self._total is not None, "only gradients that are whole everywhere may be used"
        for gradient, total in zip(_local(self.parameters), self._total, strict=True):
            gradient.copy_(total)
        step.loss = math.fsum(self._losses)
        self._committed = (self.completed, 0.0)
        self._shares = full_shares(self._plan)
        self.completed += 1

    # Losses.

    def _recover(self, reason: str, step: Step) -> None:
        """Agree with the survivors on what is kept, and share out the rest."""
        self.recoveries += 1
        self._rendezvous.call_recovery(reason)
        decision = self._rendezvous.agree(self._report(step), self._microbatches)
        if decision.completed > self.completed:
            self._complete(step)
        before = self._plan.layout
        self._take_leave(decision)
        self._shares = rest_shares(self._plan, before, decision.kept)
        if self.completed == step.number:
            self._keep(step, self._share.inherited)
        self._connect()

    def _report(self, step: Step) -> Report:
        place = self._alive.index(self.seat.replica)
        summed = self._total is not None
        held = Holding(0, place, self.seat.members, spans(step.reported), summed)
        if self.completed > step.number:
            held = Holding(0, place, self.seat.members)
        return Report(epoch=0, completed=self.completed, holdings=(held,), norm=self._committed)

    def _take_leave(self, decision: Decision) -> None:
        """Go on with the replicas that are whole; leave if this one is not."""
        alive = set(decision.survivors)
        self._alive = [r for r in self._alive if alive.issuperset(self.seat.ranks(r))]
        if self.seat.replica not in self._alive:
            raise FencedOutError(f"replica {self.seat.replica} has lost a member")
        self._rendezvous.alive = tuple(k for r in self._alive for k in self.seat.ranks(r))
        self._plan = self._new_plan()

    def _keep(self, step: Step, inherited: Sequence[Kept]) -> None:
        """Bring the local sums to what the decision says that they are."""
        if not inherited:
            step.reported.clear()
            self._held.clear()
            for gradient in _local(self.parameters):
                gradient.zero_()
        elif inherited[0].total:
            assert self._total is not None
            self._held = {(0, self._microbatches): self._total}
            step.reported.update(enumerate(self._losses))
            for gradient, total in zip(_local(self.parameters), self._total, strict=True):
                gradient.copy_(total)
        self._total = None

    # Worlds.

    def _new_plan(self) -> Plan:
        seats = [tuple(self.seat.ranks(replica)) for replica in self._alive]
        layout = Layout(tuple(Replica((Stage(ranks, (0, 1)),)) for ranks in seats))
        quotas = tuple(self._quotas(self._alive))
        if sum(quotas) != self._microbatches:
            raise ContractError("quotas", f"must sum to {self._microbatches}, not {sum(quotas)}")
        return Plan(version=self.recoveries, layout=layout, quotas=quotas)

    def _connect(self, *, is_starting: bool = False) -> None:
        """Build the groups of those alive. At the start a peer's silence means nothing yet."""
        rendezvous = self._rendezvous
        if self._peers is not None:
            self._old.append(self._peers)  # closing it could block as long as its exchanges
        network = Network(
            rendezvous.open_store(),
            self.seat.rank,
            broken=rendezvous.broken,
            timeout=rendezvous.timeouts.exchange,
            waited=WaitClock(),
        )
        peers = [self.seat.ranks(replica)[self.seat.index] for replica in self._alive]
        self._peers = connect_peers(
            network,
            f"loop{rendezvous.recovery}",
            rendezvous.alive,
            peers,
            lambda ranks, waited_s: rendezvous.broken(ranks, 0.0 if is_starting else waited_s),
        )


def _local(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This process's part of each gradient; zeros where nothing was computed."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found


def _added(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    """left + right, in the memory of `left`."""
    for total, gradient in zip(left, right, strict=True):
        total.add_(gradient)
    return left
