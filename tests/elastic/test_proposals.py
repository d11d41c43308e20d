"""Proposals in the store, and what is left of them when the store is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from resihp.contracts import Plan
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.proposals import Proposal, ProposalBoard
from tests.elastic.engine_job import ALONE, MICROBATCHES, TIMEOUTS

PROPOSAL = Proposal(Plan(version=1, layout=ALONE, quotas=(MICROBATCHES,)), members=(0,))


class EndingStore:
    """A store that answers so many requests, and then ends."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.answers = 1000

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def request(*arguments: Any) -> Any:
            self.answers -= 1
            if self.answers < 0:
                raise dist.DistNetworkError("failed to recv, got 0 bytes")
            return method(*arguments)

        return request


def board_of(store: EndingStore) -> ProposalBoard:
    return ProposalBoard(Rendezvous(lambda: store, 0, (0,), TIMEOUTS))  # type: ignore[arg-type, return-value]


def test_a_proposal_is_read_as_it_was_published() -> None:
    board = board_of(EndingStore())
    assert board.read(1) is None
    board.publish(1, PROPOSAL)
    assert board.read(1) == PROPOSAL
    assert not board.reshard_started(1)
    board.start_reshard(1)
    assert board.reshard_started(1)


@pytest.mark.parametrize("name", ["read", "start_reshard", "reshard_started"])
@pytest.mark.parametrize("answers", [0, 1])
def test_the_loss_of_the_store_does_not_stop_training(name: str, answers: int) -> None:
    """At whichever request it falls: nothing is proposed any more."""
    store = EndingStore()
    board = board_of(store)
    board.publish(1, PROPOSAL)
    store.answers = answers
    assert not getattr(board, name)(1)
    assert not getattr(board, name)(1), "it is not asked again"
