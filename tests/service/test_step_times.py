"""Step times are those of whole steps, also with many steps in a message and after a restart."""

import numpy as np

from detector.persistence import pack, unpack
from resihp.contracts import Op, TelemetryBatch
from service.worker.step_times import StepTimes


def message(rank, steps, ms=10.0):
    """A forward record of half the time and an optimizer record of the other half, per step."""
    return TelemetryBatch(
        rank=np.full(2 * len(steps), rank),
        step=np.repeat(steps, 2),
        microbatch=np.zeros(2 * len(steps), int),
        op=np.tile([Op.FORWARD, Op.OPTIMIZER], len(steps)),
        compute_ms=np.full(2 * len(steps), ms / 2),
    )


def test_a_step_is_closed_with_all_ranks_though_one_is_many_steps_ahead():
    times = StepTimes([0, 1])
    assert times.add(message(0, range(20))) == []
    closed = times.add(message(1, range(20), ms=30.0))
    assert [step.step for step in closed] == list(range(19))
    assert {step.observed_ms for step in closed} == {30.0}
    assert closed[0].ranks == {0: (5.0, 0.0, 0.0, 5.0), 1: (15.0, 0.0, 0.0, 15.0)}


def test_a_lost_rank_is_not_waited_for():
    times = StepTimes([0, 1])
    times.add(message(1, [0]))
    assert [step.step for step in times.add(message(0, [0, 1, 2]), lost=[1])] == [0, 1]


def test_after_a_restart_in_another_layout_the_newest_step_is_the_earlier_one():
    times = StepTimes([0, 1])
    for rank in (0, 1):
        times.add(message(rank, range(100)))
    assert times.last_step == 99
    assert [step.step for step in times.move([1])] == [99]
    assert [step.step for step in times.add(message(1, [60, 61]))] == [60]
    assert times.last_step == 61


def test_a_step_that_one_rank_makes_up_is_not_the_newest():
    times = StepTimes([0, 1, 2])
    for step in range(10):
        for rank in range(3):
            times.add(message(rank, [step]))
        times.add(message(0, [2**50 + step]))
    assert times.last_step == 9


def test_a_step_made_up_in_the_first_message_does_not_stay_the_newest():
    times = StepTimes([0, 1, 2])
    closed = times.add(message(0, range(2**50, 2**50 + 9)))
    for step in range(10):
        for rank in range(3):
            closed += times.add(message(rank, [step]))
    assert times.last_step == 9
    assert [step.step for step in closed if step.step < 2**50][-5:] == [4, 5, 6, 7, 8]


def test_a_job_whose_ranks_all_jump_is_followed():
    times = StepTimes([0, 1])
    for steps in (range(5), range(10**6, 10**6 + 5)):
        for step in steps:
            for rank in (0, 1):
                times.add(message(rank, [step]))
    assert times.last_step == 10**6 + 4


def test_a_message_of_thousands_of_steps_opens_few_at_a_time():
    times, alone = StepTimes(range(4096)), StepTimes([0, 1])
    whole = message(0, range(3000))
    shuffled = whole.select(np.random.default_rng(0).permutation(len(whole)))
    closed = times.add(shuffled)
    assert [step.step for step in closed] == list(range(len(closed)))
    assert len(closed) > 2500
    assert closed[7].ranks == {0: (5.0, 0.0, 0.0, 5.0)}
    assert alone.add(message(0, range(200))) == []  # these wait for rank 1


def test_after_an_outage_all_ranks_are_waited_for_though_one_is_three_messages_ahead():
    times, length, closed = StepTimes(range(8)), 300, []
    others = [(rank, part) for part in range(5) for rank in range(1, 8)]
    for rank, part in [*((0, at) for at in range(3)), *others[:14], (0, 3), (0, 4), *others[14:]]:
        closed += times.add(message(rank, range(part * length, (part + 1) * length)))
    assert [step.step for step in closed] == list(range(5 * length - 1))
    assert {len(step.ranks) for step in closed} == {8}


def test_whole_steps_that_are_sent_again_are_not_timed_again():
    times = StepTimes([0, 1])
    sent = [message(rank, [step], ms=10.0 + step) for step in range(30) for rank in (0, 1)]
    closed = [
        step for part in (sent, sent[30:50], sent[50:]) for m in part for step in times.add(m)
    ]
    assert [step.step for step in closed] == list(range(29))
    assert times.last_step == 29


def test_a_run_of_other_processes_begins_with_their_first_messages():
    times = StepTimes([0, 1])
    for _ in range(2):
        times.expect([0, 1])
        closed = times.add(message(0, range(40))) + times.add(message(1, range(40), ms=30.0))
        assert [step.step for step in closed] == list(range(39))
        assert times.last_step == 39


def test_a_step_that_other_processes_do_again_counts_once():
    times = StepTimes([0, 1])
    for rank in (0, 1):
        times.add(message(rank, range(6)))
        times.add(message(rank, [6]).select([0]))  # they end in the middle of it
    times.expect([0, 1])
    closed = [step for rank in (0, 1) for step in times.add(message(rank, range(6, 9)))]
    assert [(step.step, step.observed_ms) for step in closed] == [(6, 10.0), (7, 10.0)]


def test_of_what_a_process_replaced_by_no_other_sent_nothing_is_dropped():
    times = StepTimes([0, 1])
    for rank in (0, 1):
        times.add(message(rank, range(6)))
        times.add(message(rank, [6]).select([0]))
    times.expect([5])  # of no rank of the layout
    closed = [
        step for rank in (0, 1) for step in times.add(message(rank, [6, 7]).select([1, 2, 3]))
    ]
    assert [(step.step, step.observed_ms) for step in closed] == [(6, 10.0)]


def test_what_is_sent_twice_counts_once():
    """In a message of its own, twice in one, and after the state was saved."""
    times = StepTimes([0, 1])
    for rank in (0, 1):
        first = message(rank, range(3))
        times.add(first.select([0, 1, 2, 3]))
        times.add(TelemetryBatch.concat([first, first]))
    again = StepTimes([0, 1])
    again.load(unpack(pack(times.state())))
    closed = []
    for rank in (0, 1):
        closed += again.add(message(rank, range(2, 4)))
    assert [(step.step, step.observed_ms) for step in closed] == [(2, 10.0)]


def test_of_a_host_the_ranks_of_a_new_process_do_a_step_again_and_the_others_do_not():
    times = StepTimes([0, 1])
    host = TelemetryBatch.concat([message(0, range(7)), message(1, range(7))])
    assert [step.observed_ms for step in times.add(host)] == [10.0] * 6
    times.expect([0])
    again = TelemetryBatch.concat([message(0, [6], ms=30.0), message(1, [6], ms=30.0)])
    closed = times.add(again) + times.add(message(0, [7])) + times.add(message(1, [7]))
    assert [step.ranks[0] for step in closed] == [(15.0, 0.0, 0.0, 15.0)]
    assert closed[0].ranks[1][0] == 5.0, "a pass of rank 1 that came twice"
