"""What survivors decide, from what each of them reports."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from resihp.contracts import FencedOutError, StateLostError
from resihp.elastic.microbatches.ledger import GradientHolding, SurvivingSum
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.consensus import SurvivorReport, agree, decide
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import announce_death
from tests.elastic.engine_job import BRISK

report = SurvivorReport
MICROBATCHES = 4


def held(
    replica: int, *, generation: int = 0, members: int = 1, summed: bool = False
) -> GradientHolding:
    """One rank's gradients: the first two microbatches, or the last two."""
    finished = ((2 * replica, 2 * replica + 2),)
    return GradientHolding(generation, replica, members, finished, summed)


def test_of_a_step_that_nobody_knows_to_be_whole_each_whole_replica_is_kept() -> None:
    reports = {
        0: report(generation=0, completed=5, holdings=(held(0),), norm=(4, 1.0)),
        1: report(generation=0, completed=5, holdings=(held(1, members=2),), norm=(4, 1.0)),
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.completed, decision.survivors, decision.next_generation) == (5, (0, 1), 1)
    assert decision.kept == (SurvivingSum(0, ((0, 2),)),)


def test_of_a_step_that_all_of_a_replica_have_summed_the_sum_is_kept() -> None:
    reports = {
        0: report(generation=0, completed=5, holdings=(held(0, summed=True),), norm=(4, 1.0)),
        1: report(generation=0, completed=5, holdings=(held(1, members=2),), norm=(4, 1.0)),
    }
    assert decide(reports, MICROBATCHES).kept == (SurvivingSum(0, ((0, 4),), total=True),)


def test_a_replica_whose_stages_have_finished_unequal_work_redoes_it() -> None:
    ahead = GradientHolding(0, 1, 2, ((2, 4),))
    behind = GradientHolding(0, 1, 2, ((2, 3),))
    reports = {
        0: report(generation=0, completed=5, holdings=(held(0),)),
        1: report(generation=0, completed=5, holdings=(ahead,)),
        2: report(generation=0, completed=5, holdings=(behind,)),
    }
    assert decide(reports, MICROBATCHES).kept == (SurvivingSum(0, ((0, 2),)),)


def test_what_ranks_in_doubt_inherit_counts_if_their_world_holds() -> None:
    reports = {
        0: report(generation=4, completed=5, holdings=(held(0, generation=4, members=2),)),
        1: report(
            generation=3,
            completed=5,
            in_doubt=4,
            holdings=(held(1, generation=3), held(0, generation=4, members=2)),
        ),
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.generation, decision.kept) == (4, (SurvivingSum(0, ((0, 2),)),))


def test_buckets_that_survivors_have_summed_are_known_to_all() -> None:
    """Those of the step in progress; who joins, or is behind, has none."""
    reports = {
        0: report(completed=5, generation=0, holdings=(replace(held(0), buckets=3),)),
        1: report(completed=5, generation=0, holdings=(replace(held(1), buckets=2),), joiners=(2,)),
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.survivors, decision.buckets) == ((0, 1, 2), (3, 2, 0))
    reports[0] = report(completed=6, generation=0, norm=(5, 0.0))
    reports[1] = replace(
        reports[1], holdings=(replace(held(1, summed=True), buckets=2),), norm=(4, 0.0)
    )
    assert decide(reports, MICROBATCHES).buckets == (0, 0, 0)


def test_a_step_that_one_rank_knows_to_be_whole_is_completed_by_all() -> None:
    reports = {
        0: report(generation=2, completed=6, norm=(5, 0.25)),  # has made the update already
        1: report(
            generation=2, completed=5, holdings=(held(0, generation=2, summed=True),), norm=(4, 1.0)
        ),  # holds whole gradients
        2: report(
            generation=2,
            completed=5,
            holdings=(held(0, generation=2, summed=True),),
            norm=(5, 0.25),
        ),  # was about to update
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.completed, decision.norm) == (6, 0.25)


def test_a_rank_that_lacks_the_gradients_of_a_completed_step_is_an_error() -> None:
    reports = {
        0: report(generation=0, completed=6, norm=(5, 0.25)),
        1: report(generation=0, completed=5, norm=(4, 1.0)),
    }
    with pytest.raises(StateLostError, match="rank 1 cannot complete step 5"):
        decide(reports, MICROBATCHES)


def test_a_world_that_one_rank_has_taken_on_holds_for_those_in_doubt() -> None:
    reports = {
        0: report(generation=4, completed=9, norm=(8, 1.0), seen=4),
        1: report(generation=3, completed=9, norm=(8, 1.0), in_doubt=4, seen=4),
    }
    assert decide(reports, MICROBATCHES).generation == 4
    assert decide(reports, MICROBATCHES).next_generation == 5


def test_a_world_that_everyone_doubts_is_given_up() -> None:
    reports = {
        rank: report(generation=3, completed=9, norm=(8, 1.0), in_doubt=4, seen=4)
        for rank in (0, 1)
    }
    assert decide(reports, MICROBATCHES).generation == 3
    assert decide(reports, MICROBATCHES).next_generation == 5


def test_a_rank_without_the_state_of_the_world_that_holds_is_an_error() -> None:
    reports = {0: report(generation=4, completed=9), 1: report(generation=3, completed=9)}
    with pytest.raises(StateLostError, match="rank 1 holds no state of generation 4"):
        decide(reports, MICROBATCHES)


def test_idle_ranks_follow_whatever_holds() -> None:
    reports = {
        0: report(generation=4, completed=9, norm=(8, 1.0)),
        7: report(generation=4, completed=3, idle=True),
    }
    assert decide(reports, MICROBATCHES).survivors == (0, 7)
    assert decide(reports, MICROBATCHES).completed == 9


def test_a_world_that_has_gone_back_to_a_checkpoint_holds_with_its_own_steps() -> None:
    """Rank 0 has taken it on and is at step 6 again; rank 1 doubts it, and knows of step 9."""
    reports = {
        0: report(generation=4, completed=6, holdings=(held(0, generation=4, members=2),), seen=4),
        1: report(generation=3, completed=9, norm=(9, 1.0), in_doubt=4, rewound=6, seen=4),
        2: report(generation=3, completed=0, in_doubt=4, rewound=6, seen=4, idle=True),
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.generation, decision.completed, decision.norm) == (4, 6, None)


def test_a_world_that_was_to_go_back_and_is_given_up_changes_no_step() -> None:
    """Rank 1 would have gone back to step 6; rank 0 had not come so far."""
    reports = {
        0: report(generation=3, completed=9, norm=(8, 1.0), seen=4),
        1: report(generation=3, completed=9, norm=(8, 1.0), in_doubt=4, rewound=6, seen=4),
        2: report(generation=3, completed=0, in_doubt=4, rewound=6, seen=4, idle=True),
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.generation, decision.completed) == (3, 9)


def test_the_decision_does_not_depend_on_who_asks() -> None:
    reports = {
        rank: report(generation=1, completed=2, holdings=(held(rank, generation=1),), norm=(1, 2.0))
        for rank in range(5)
    }
    backwards = dict(sorted(reports.items(), reverse=True))
    assert decide(reports, MICROBATCHES) == decide(backwards, MICROBATCHES)


def test_newcomers_take_part_and_whoever_holds_no_state_is_told() -> None:
    """Rank 2 came in at the last recovery and has not got its state; rank 4 comes in now."""
    reports = {
        0: report(generation=0, completed=5, holdings=(held(0),), joiners=(4,)),
        1: report(generation=0, completed=5, holdings=(held(1),)),
        2: report(generation=0, completed=0, idle=True),
    }
    decision = decide(reports, MICROBATCHES)
    assert (decision.completed, decision.survivors) == (5, (0, 1, 2, 4))
    assert decision.stateless == (2, 4)
    assert decision.kept == (SurvivingSum(0, ((0, 2),)), SurvivingSum(1, ((2, 4),)))


def rendezvous_of(store: dist.Store, rank: int, members: tuple[int, ...]) -> Rendezvous:
    return Rendezvous(lambda: store, rank, members, BRISK)


def test_a_rank_that_is_still_joining_waits_for_the_decision_of_the_members() -> None:
    """The members do not count it yet: had it decided, it would have counted itself."""
    store = dist.HashStore()
    joiner, member = rendezvous_of(store, 1, ()), rendezvous_of(store, 0, (0,))
    joiner.enter(0, (0, 1), is_joining=True)
    fenced: list[str] = []

    def join() -> None:
        try:
            agree(joiner, report(generation=0, completed=0, idle=True), MICROBATCHES)
        except FencedOutError as error:
            fenced.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    while not store.check([keys.report(0, 1)]):
        time.sleep(0.001)
    decision = agree(member, report(generation=0, completed=0), MICROBATCHES)
    thread.join(300)
    assert decision.survivors == (0,)
    assert fenced == ["rank 1 was given up by the other ranks"]


def test_a_rank_that_joins_a_job_whose_members_are_all_lost_is_fenced_out() -> None:
    store = dist.HashStore()
    joiner = rendezvous_of(store, 1, ())
    joiner.enter(0, (0, 1), is_joining=True)
    announce_death(store, 0)
    joiner.start()
    with pytest.raises(FencedOutError, match="without living members"):
        agree(joiner, report(generation=0, completed=0, idle=True), MICROBATCHES)
    joiner.close()
    assert not store.check([keys.decision(0)])
