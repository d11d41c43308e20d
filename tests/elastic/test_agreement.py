"""What survivors decide, from what each of them reports."""

from __future__ import annotations

import pytest

from resihp.contracts import StateLostError
from resihp.elastic.membership.agreement import Report, decide


def test_a_step_that_nobody_knows_to_be_whole_is_given_up() -> None:
    reports = {
        0: Report(epoch=0, completed=5, reduced=True, norm=(4, 1.0)),
        1: Report(epoch=0, completed=5, norm=(4, 1.0)),
    }
    decision = decide(reports)
    assert (decision.completed, decision.survivors, decision.next_epoch) == (5, (0, 1), 1)


def test_a_step_that_one_rank_knows_to_be_whole_is_completed_by_all() -> None:
    reports = {
        0: Report(epoch=2, completed=6, norm=(5, 0.25)),  # has made the update already
        1: Report(epoch=2, completed=5, reduced=True, norm=(4, 1.0)),  # holds whole gradients
        2: Report(epoch=2, completed=5, reduced=True, norm=(5, 0.25)),  # was about to update
    }
    decision = decide(reports)
    assert (decision.completed, decision.norm) == (6, 0.25)


def test_a_rank_that_lacks_the_gradients_of_a_completed_step_is_an_error() -> None:
    reports = {
        0: Report(epoch=0, completed=6, norm=(5, 0.25)),
        1: Report(epoch=0, completed=5, reduced=False, norm=(4, 1.0)),
    }
    with pytest.raises(StateLostError, match="rank 1 cannot complete step 5"):
        decide(reports)


def test_a_world_that_one_rank_has_taken_on_holds_for_those_in_doubt() -> None:
    reports = {
        0: Report(epoch=4, completed=9, norm=(8, 1.0), seen=4),
        1: Report(epoch=3, completed=9, norm=(8, 1.0), doubt=4, seen=4),
    }
    assert decide(reports).epoch == 4
    assert decide(reports).next_epoch == 5


def test_a_world_that_everyone_doubts_is_given_up() -> None:
    reports = {
        rank: Report(epoch=3, completed=9, norm=(8, 1.0), doubt=4, seen=4) for rank in (0, 1)
    }
    assert decide(reports).epoch == 3
    assert decide(reports).next_epoch == 5


def test_a_rank_without_the_state_of_the_world_that_holds_is_an_error() -> None:
    reports = {0: Report(epoch=4, completed=9), 1: Report(epoch=3, completed=9)}
    with pytest.raises(StateLostError, match="rank 1 holds no state of epoch 4"):
        decide(reports)


def test_idle_ranks_follow_whatever_holds() -> None:
    reports = {
        0: Report(epoch=4, completed=9, norm=(8, 1.0)),
        7: Report(epoch=4, completed=3, idle=True),
    }
    assert decide(reports).survivors == (0, 7)
    assert decide(reports).completed == 9


def test_the_decision_does_not_depend_on_who_asks() -> None:
    reports = {
        rank: Report(epoch=1, completed=2, reduced=rank != 3, norm=(1, 2.0)) for rank in range(5)
    }
    backwards = dict(sorted(reports.items(), reverse=True))
    assert decide(reports) == decide(backwards)
