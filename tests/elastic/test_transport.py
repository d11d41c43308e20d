"""Every transport delivers the same tensors, and ends a transfer when the generation is aborted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from resihp.contracts import PeerLostError
from resihp.elastic.process_groups.abortable import AbortableProcessGroup, ProcessGroupFactory
from resihp.elastic.process_groups.transport import ProcessGroupTransport, Transport, complete
from resihp.elastic.reshard.host_memory import is_supported
from resihp.elastic.reshard.shared_memory import probe_peer_memory
from tests.elastic.late_copies import late_device_memory
from tests.elastic.threads import on_ranks

SENT = (torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.int64), torch.tensor(7.0))
KINDS = [
    "process group",
    "device memory",
    pytest.param("shared memory", marks=pytest.mark.skipif(not is_supported(), reason="not Linux")),
]


def transport(kind: str, group: AbortableProcessGroup, rank: int) -> Transport:
    """From rank 0 to the others."""
    if kind == "process group":
        return ProcessGroupTransport(group, 0)
    return probe_peer_memory(group, rank, attach=True).memory[0]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with late_device_memory() if request.param == "device memory" else nullcontext():
        yield request.param


def test_the_peer_receives_what_the_source_sends(kind: str) -> None:
    def work(factory: ProcessGroupFactory) -> list[torch.Tensor]:
        group = factory.group("pair", (0, 1))
        used = transport(kind, group, factory.rank)
        assert used.source == 0
        held = [tensor.clone() for tensor in SENT]
        if factory.rank == 0:
            assert complete(used.send(held)) == 0
        else:
            held = [torch.zeros_like(tensor) for tensor in SENT]
            assert complete(used.recv(held)) == sum(tensor.nbytes for tensor in SENT)
        group.all_reduce(torch.zeros(1))  # the source keeps its tensors until then
        return held

    for held in on_ranks((0, 1), work).values():
        assert all(torch.equal(*pair) for pair in zip(held, SENT, strict=True))


def test_one_process_group_serves_several_peers() -> None:
    def work(factory: ProcessGroupFactory) -> torch.Tensor:
        used = ProcessGroupTransport(factory.group("all", (0, 1, 2)), 2)
        held = SENT[0].clone() if factory.rank == 2 else torch.zeros(2, 3)
        complete(used.send([held]) if factory.rank == 2 else used.recv([held]))
        return held

    assert all(torch.equal(held, SENT[0]) for held in on_ranks((0, 1, 2), work).values())


def test_a_transfer_ends_when_the_generation_is_aborted(kind: str) -> None:
    aborted = threading.Event()

    def work(factory: ProcessGroupFactory) -> None:
        group = factory.group("pair", (0, 1))
        used = transport(kind, group, factory.rank)
        factory._broken = lambda ranks, waited_s: "aborted" if aborted.is_set() else None
        if factory.rank == 1:
            transfer = used.recv([torch.zeros(3)])  # rank 0 never sends
            aborted.set()
            with pytest.raises(PeerLostError, match="aborted"):
                complete(transfer)

    on_ranks((0, 1), work)
