"""The diagnosis from microbatch records alone: groups, lengths, chunks and uneven layouts."""

import re
from dataclasses import replace

import numpy as np
import pytest

from detector.diagnosis import Costs, costs_of, diagnose
from detector.whatif.places import SlowDevice, known_factor
from detector.whatif.step_replay import StepReplay
from resihp.contracts import (
    Cause,
    Job,
    Layout,
    Op,
    Replica,
    Schedule,
    Stage,
    Status,
    TelemetryBatch,
    Verdict,
)
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay


def job_of(layout, microbatches, **other):
    return Job(name="made up", layout=layout, microbatches=microbatches * layout.dp, **other)


def records(job, *, steps=6, seed=0, slow=None, lengths=False, spread=0.0, noise=0.002, more=None):
    """Compute records of every rank; `slow` maps ranks to factors from step 2 on, and `more`
    replicas to factors of their work."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        for d, replica in enumerate(job.layout.replicas):
            work = np.exp(spread * rng.standard_normal(job.quotas[d])) * (more or {}).get(d, 1.0)
            for stage in replica.stages:
                for rank in stage.ranks:
                    factor = (slow or {}).get(rank, 1.0) if step >= 2 else 1.0
                    for mb in range(job.quotas[d]):
                        for chunk in range(job.chunks):
                            for op, base in ((Op.FORWARD, 10.0), (Op.BACKWARD, 20.0)):
                                time = (
                                    base * factor * work[mb] * np.exp(noise * rng.standard_normal())
                                )
                                size = int(1000 * work[mb]) if lengths else -1
                                rows.append((rank, step, mb, chunk, op, time, size))
    columns = list(zip(*rows, strict=True))
    names = ("rank", "step", "microbatch", "chunk", "op", "compute_ms", "tokens")
    given = {name: np.array(column) for name, column in zip(names, columns, strict=True)}
    return TelemetryBatch(**given, sum_sq_len=given["tokens"])


def test_the_replay_agrees_with_that_of_the_pipeline():
    job = job_of(Layout.grid(dp=1, pp=4, tp=1, layers=4), 6)
    batch = records(job, steps=1, spread=0.2, seed=5)
    orders = [stage_order(job.schedule, stage=s, stages=4, microbatches=6) for s in range(4)]
    times = np.zeros((2, 4, 6))
    times[batch.op, batch.rank, batch.microbatch] = batch.compute_ms
    expected = replay(orders, pass_durations(orders, times[0], times[1])).span
    assert costs_of(job, job.layout, [batch]).step == pytest.approx(expected)


def test_a_replica_is_replayed_with_its_own_numbers_in_flight():
    one, other = Layout.grid(dp=2, pp=4, tp=1, layers=4).replicas
    layout = Layout((replace(one, in_flight=(1, 1, 1, 1)), other))
    job = job_of(layout, 6)
    batch = records(job, steps=1, noise=0.0, spread=0.0)
    at_a_time = costs_of(job, layout, [batch]).step
    assert at_a_time == pytest.approx(6 * 4 * 30.0)


def test_chunks_that_the_schedule_does_not_run_are_no_error():
    """As in a profile of torch's V-shaped zero bubble, whose job says what it can of it."""
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=4)
    job = Job(name="made up", layout=layout, microbatches=8, schedule=Schedule.ZERO_BUBBLE)
    batch = records(job, steps=2)
    second = replace(batch, chunk=np.ones(len(batch), dtype=np.int64))
    both = TelemetryBatch.concat([batch, second])
    assert costs_of(replace(job, chunks=2), layout, [both]).step > 0.0


def test_a_replica_without_microbatches_joins_the_collectives_only():
    layout = Layout.grid(dp=3, pp=2, tp=1, layers=4)
    job = Job(name="made up", layout=layout, microbatches=8, quotas=(4, 4, 0))
    batch = records(job, steps=1, noise=0.0)
    passes = (4 + 1) * 30.0
    assert costs_of(job, layout, [batch]).step == pytest.approx(passes)
    ranks = layout.replicas[2].ranks
    idle = TelemetryBatch(
        rank=ranks, step=[0, 0], microbatch=[-1, -1], op=[Op.COLLECTIVE] * 2, compute_ms=[7.0] * 2
    )
    with_collectives = costs_of(job, layout, [TelemetryBatch.concat([batch, idle])])
    assert with_collectives.step == pytest.approx(passes + 7.0)
    slow = records(job, slow={3: 1.4})
    assert diagnose(job, layout, [slow]).root_cause is Cause.DEVICE


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_equal_work_on_equal_devices_loses_nothing(schedule):
    job = job_of(Layout.grid(dp=2, pp=4, tp=1, layers=4), 8, schedule=schedule)
    diagnosis = diagnose(job, job.layout, [records(job, noise=0.0)])
    assert diagnosis.slowdown == pytest.approx(1.0)
    assert diagnosis.root_cause is Cause.NONE


def test_interleaved_chunks_are_replayed_as_stages_of_their_own():
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=4)
    job = job_of(layout, 4, schedule=Schedule.INTERLEAVED, chunks=2)
    slow = diagnose(job, layout, [records(job, slow={3: 1.5})])
    assert slow.root_cause is Cause.DEVICE


def test_a_limit_in_flight_that_does_not_fit_the_microbatches_that_ran_is_no_error():
    layout = Layout.grid(dp=2, pp=4, tp=1, layers=8)
    job = job_of(layout, 8, schedule=Schedule.INTERLEAVED, chunks=2, max_in_flight=6)
    batch = records(job, slow={3: 1.5})
    ran = batch.select(batch.microbatch < 7)
    assert diagnose(job, layout, [batch]).root_cause is Cause.DEVICE
    assert costs_of(job, layout, [ran]) == costs_of(replace(job, max_in_flight=None), layout, [ran])
    assert diagnose(job, layout, [ran]).root_cause is Cause.DEVICE


def test_interleaved_replicas_of_other_lengths_are_replayed_with_their_own_passes():
    """One of two stages and one of a single stage, which runs one chunk."""
    three, two = (Layout.grid(dp=1, pp=pp, tp=1, layers=6, chunks=2).replicas[0] for pp in (3, 2))
    two = Replica(tuple(replace(s, ranks=(3 + r,)) for r, s in enumerate(two.stages)))
    layout = Layout((three, two, Replica((Stage((5,), (0, 6)),))))
    job = job_of(layout, 6, schedule=Schedule.INTERLEAVED, chunks=2)
    batch = records(job, steps=1, noise=0.0)
    batch = batch.select((batch.rank != 5) | (batch.chunk == 0))
    for ranks, factor in (((3, 4), 10.0), ((5,), 20.0)):  # whose replica decides
        slow = np.isin(batch.rank, ranks) * (factor - 1.0) + 1.0
        decided = costs_of(job, layout, [replace(batch, compute_ms=batch.compute_ms * slow)]).step
        passes = 6 if ranks == (5,) else 6 * 2 + 1  # the last chunk is behind one pass
        assert decided == pytest.approx(passes * 30.0 * factor)


@pytest.mark.parametrize("pp", [1, 4])
def test_the_slowest_rank_of_a_group_slows_it(pp):
    job = job_of(Layout.grid(dp=4, pp=pp, tp=2, layers=4), 4)
    diagnosis = diagnose(job, job.layout, [records(job, slow={3: 1.4})])
    assert diagnosis.root_cause is Cause.DEVICE


@pytest.mark.parametrize("dp", [1, 4])
def test_lengths_tell_work_from_devices_even_without_a_pipeline(dp):
    job = job_of(Layout.grid(dp=dp, pp=1, tp=1, layers=4), 8)
    slow = diagnose(job, job.layout, [records(job, slow={0: 1.6}, lengths=True, spread=0.1)])
    assert slow.root_cause is Cause.DEVICE
    if dp > 1:
        long = diagnose(job, job.layout, [records(job, lengths=True, spread=0.4)])
        assert long.root_cause is Cause.SEQUENCE_IMBALANCE


@pytest.mark.parametrize(("pp", "lengths"), [(1, True), (4, True), (4, False)])
@pytest.mark.parametrize("factor", [1.5, 8.0])
def test_lasting_work_of_one_replica_is_work(pp, lengths, factor):
    """All of its microbatches are alike: none is longer than the others of its replica."""
    job = job_of(Layout.grid(dp=8, pp=pp, tp=1, layers=4), 4)
    given = records(job, lengths=lengths, more={5: factor}, noise=0.01)
    diagnosis = diagnose(job, job.layout, [given])
    assert diagnosis.root_cause is Cause.SEQUENCE_IMBALANCE
    assert diagnosis.attribution[Cause.SEQUENCE_IMBALANCE] > 0.9
    assert f"the fullest replica {factor * 8 / (7 + factor):.2f}x" in diagnosis.detail[0]
    (rank,) = job.layout.replicas[5].stages[0].ranks
    both = records(job, lengths=lengths, more={5: 1.5}, slow={rank: 2.0}, noise=0.01)
    found = diagnose(job, job.layout, [both]).attribution
    assert min(found[Cause.DEVICE], found[Cause.SEQUENCE_IMBALANCE]) > 0.2


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_pass_that_took_no_time_is_not_compared_with_others(pp, lengths):
    """The members of a tensor-parallel group are their only peers."""
    job = job_of(Layout.grid(dp=1, pp=pp, tp=2, layers=4), 4)
    batch = records(job, slow={0: 1.4}, noise=0.02, spread=0.2, lengths=lengths)
    empty = (batch.step == 3) & (batch.microbatch == 1) & (batch.op == Op.FORWARD)
    for ranks in (0, 1), (1,):
        rows = empty & np.isin(batch.rank, ranks)
        odd = replace(batch, compute_ms=np.where(rows, 0.0, batch.compute_ms))
        found, usual = (diagnose(job, job.layout, [each]) for each in (odd, batch))
        assert found.root_cause is usual.root_cause
        assert found.slowdown == pytest.approx(usual.slowdown, rel=0.05)


@pytest.mark.parametrize("pp", [1, 2])
def test_lengths_tell_work_from_noise_where_the_forward_pass_alone_is_timed(pp):
    job = job_of(Layout.grid(dp=4, pp=pp, tp=1, layers=4), 8)

    def cause(**what):
        batch = records(job, lengths=True, **what)
        return diagnose(job, job.layout, [batch.select(batch.op == Op.FORWARD)]).root_cause

    assert cause(spread=0.3) is Cause.SEQUENCE_IMBALANCE
    assert cause(noise=0.3) is not Cause.SEQUENCE_IMBALANCE


def test_uneven_replicas_are_replayed_one_by_one():
    layout = Layout(
        (
            Replica((Stage((0, 1), (0, 2)), Stage((2,), (2, 4)))),
            Replica((Stage((3,), (0, 4)),)),
        )
    )
    job = Job(name="j", layout=layout, microbatches=7, quotas=(4, 3))
    replayed = StepReplay.of(job, layout, [records(job, noise=0.0)])
    assert replayed.step_ms == pytest.approx(max((4 + 1) * 30.0, 3 * 30.0))


def test_a_rank_that_was_never_recorded_counts_as_its_peers():
    job = job_of(Layout.grid(dp=3, pp=2, tp=1, layers=2), 4)
    batch = records(job)
    whole, part = (
        costs_of(job, job.layout, [rows]) for rows in (batch, batch.select(batch.rank != 4))
    )
    assert part.step == pytest.approx(whole.step, rel=0.02)


def test_only_the_newest_plan_counts_and_foreign_ranks_do_not():
    job = job_of(Layout.grid(dp=2, pp=2, tp=1, layers=2), 4)
    old = records(job, slow={0: 3.0})
    columns = records(job).columns()
    new = TelemetryBatch(**columns, plan_version=1)
    stray = TelemetryBatch(**{**columns, "rank": columns["rank"] + 100}, plan_version=1)
    expected = costs_of(job, job.layout, [new])
    assert costs_of(job, job.layout, [old, new, stray]) == expected


def test_transfers_collectives_and_data_take_their_time():
    job = job_of(Layout.grid(dp=1, pp=2, tp=1, layers=2), 2)
    compute = records(job, steps=1, noise=0.0)
    extra = TelemetryBatch(
        rank=[0, 0, 1, 0, 1, 0],
        step=[0] * 6,
        microbatch=[0, 1, -1, -1, -1, -1],
        op=[Op.P2P, Op.P2P, Op.COLLECTIVE, Op.OPTIMIZER, Op.OPTIMIZER, Op.DATA],
        compute_ms=[1.0, 1.0, 4.0, 2.0, 2.0, 5.0],
        peer=[1, 1, -1, -1, -1, -1],
    )
    bare = costs_of(job, job.layout, [compute])
    full = costs_of(job, job.layout, [compute, extra])
    # The data, one transfer each way, the last stage's collective off the path, the optimizer.
    assert full.step == pytest.approx(bare.step + 5.0 + 2 * 1.0 + 2.0)
    assert full.lost[Cause.HOST] == pytest.approx(5.0)


def test_costs_of_stretches_are_averaged_by_their_steps():
    one = Costs(step=1.0, ideal=1.0, lost={Cause.HOST: 0.0}, steps=1)
    three = Costs(step=5.0, ideal=2.0, lost={Cause.HOST: 2.0}, steps=3)
    mean = Costs.mean([one, three, Costs(step=0.0, ideal=0.0, lost={}, steps=0)])
    assert (mean.step, mean.steps, mean.lost[Cause.HOST]) == (4.0, 4, 1.5)
    assert mean.slowdown == pytest.approx(4.0 / 1.75)


def test_the_slowdown_is_no_less_than_what_slow_devices_cost():
    """One of four devices that wait for each other at every layer: the mean holds its slowness."""
    costs = Costs(step=1.2, ideal=1.15, lost={Cause.DEVICE: 0.2, Cause.HOST: 0.1}, steps=3)
    assert costs.slowdown == pytest.approx(1.2)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_group_without_peers_shows_its_slow_member_from_the_first_step(pp):
    layout = Layout.grid(dp=1, pp=pp, tp=4, layers=4)
    job = job_of(layout, 4)
    slow, even = (records(job, slow=factors, spread=0.2, noise=0.01) for factors in ({2: 1.5}, {}))
    late = slow.select(slow.step >= 2)
    found = costs_of(job, layout, [late])
    assert found.lost[Cause.DEVICE] > 0.2 * found.step
    none = costs_of(job, layout, [even])
    assert none.lost[Cause.DEVICE] < 0.02 * none.step


def test_what_is_known_of_a_device_is_not_taken_for_a_heavy_stage():
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=4)
    job = job_of(layout, 4)
    batch = records(job, slow={1: 1.5})
    batch = batch.select(batch.step >= 2)
    assert diagnose(job, layout, [batch]).root_cause is Cause.STAGE_IMBALANCE
    (device,) = SlowDevice.named([Verdict(rank=1, status=Status.FAIL_SLOW, slowdown=1.5)], layout)
    known = diagnose(job, layout, [batch], [device])
    assert known.root_cause is Cause.DEVICE
    assert known.attribution[Cause.DEVICE] > 0.9


def test_a_device_counts_as_slow_only_while_it_was():
    slow = SlowDevice(rank=3, dp=1, pp=1, factor=2.0, since=2, until=4)
    factor = known_factor([slow], np.arange(6), np.arange(2), stages=2, chunks=2)
    assert (
        factor[0, :, 1, :, 0].T.tolist()
        == [[1, 1, 1, 1]] * 2 + [[1, 2, 1, 2]] * 2 + [[1, 1, 1, 1]] * 2
    )
    assert (factor[0, :, 0] == 1.0).all()


def in_parts(batch, layout):
    """Records in proportion to what each rank holds of 8 layers in 16 units."""
    size = {
        rank: stage.layer_count / 8 * units / 16
        for replica in layout.replicas
        for stage in replica.stages
        for rank, units in zip(stage.ranks, stage.shares, strict=True)
    }
    held = np.array([size[rank] for rank in batch.rank.tolist()])
    return replace(batch, compute_ms=batch.compute_ms * held)


def replica(first, *stages):
    """A replica of stages that are given by their number of layers and their shares."""
    built, layer = [], 0
    for layers, *shares in stages:
        ranks = tuple(range(first, first + len(shares)))
        built.append(Stage(ranks, (layer, layer + layers), tuple(shares)))
        first, layer = first + len(shares), layer + layers
    return Replica(tuple(built))


UNEVEN = [
    Layout((replica(0, (4, 8, 8), (4, 8, 8)), replica(4, (4, 16), (4, 8, 8)))),
    Layout((replica(0, (8, 8, 8)), replica(2, (8, 8, 8)), replica(4, (8, 16)))),
    Layout((replica(0, (4, 8, 8), (4, 8, 8)), replica(4, (6, 11, 5), (2, 8, 8)))),
    Layout((replica(0, (8, 11, 5)), replica(2, (8, 8, 8)))),
    Layout((replica(0, (8, 11, 5)),)),
]


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("layout", UNEVEN)
def test_holding_more_of_the_model_is_not_being_slow(layout, lengths):
    """As after a plan, which gives a slow device less to do and others what a lost one held."""
    job = job_of(layout, 4)
    batch = in_parts(records(job, spread=0.1, lengths=lengths), layout)
    found = StepReplay.of(job, layout, [batch])
    assert np.abs(found.effects.device - 1.0).max() < 0.02
    assert found.lost_ms[Cause.DEVICE] < 0.02 * found.step_ms
    fullest = re.search(r"fullest replica (\S+)x", found.where.get(Cause.SEQUENCE_IMBALANCE, ""))
    assert fullest is None or float(fullest[1]) < 1.1


@pytest.mark.parametrize("layout", UNEVEN)
def test_a_device_that_slows_is_found_whatever_it_holds(layout):
    job = job_of(layout, 4)
    for stage in (layout.replicas[0].stages[0], layout.replicas[-1].stages[-1]):
        slow = {stage.ranks[int(np.argmax(stage.shares))]: 1.5}
        batch = in_parts(records(job, slow=slow, lengths=True), layout)
        assert StepReplay.of(job, layout, [batch]).effects.device.max() == pytest.approx(1.5, 0.02)


def slowed(batch, ranks, since, factor=1.5):
    """Records of which those of some ranks take longer from a step on."""
    slow = np.isin(batch.rank, ranks) & (batch.step >= since)
    return replace(batch, compute_ms=batch.compute_ms * np.where(slow, factor, 1.0))


@pytest.mark.parametrize(("since", "slow"), [(14, {}), (14, {0: 1.3}), (6, {})])
@pytest.mark.parametrize("factor", [1.6, 0.6])
@pytest.mark.parametrize("pp", [1, 2])
def test_what_all_devices_share_is_no_one_s(pp, factor, since, slow):
    """As when a machine's clocks are lowered, beside a device that turns slow for itself."""
    layout = Layout.grid(dp=2, pp=pp, tp=1, layers=8)
    job = job_of(layout, 4)
    batch = records(job, lengths=True, spread=0.1, steps=20, slow=slow)
    batch = slowed(batch, layout.ranks, since, factor)
    device = StepReplay.of(job, layout, [batch]).effects.device[0, :, :, :, 0]
    assert device[0, 0, 2:] == pytest.approx(slow.get(0, 1.0), abs=0.04)
    device[0, 0, 2:] = 1.0
    assert device == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize(("dp", "pp", "slow"), [(3, 1, 2), (4, 1, 3), (4, 2, 5)])
def test_more_than_half_of_the_devices_may_turn_slow(dp, pp, slow):
    layout = Layout.grid(dp=dp, pp=pp, tp=1, layers=8)
    job = job_of(layout, 4)
    batch = slowed(records(job, lengths=True, spread=0.1, steps=20), layout.ranks[:slow], 14)
    found = StepReplay.of(job, layout, [batch])
    last = found.effects.device[0, :, :, -1, 0].T.reshape(-1)
    assert last[:slow] == pytest.approx(1.5, abs=0.04)
    assert last[slow:] == pytest.approx(1.0, abs=0.04)
    assert found.lost_ms[Cause.DEVICE] > 0.1 * found.step_ms


@pytest.mark.parametrize("until", [0, 12])
def test_a_device_that_is_recorded_alone_is_compared_with_itself(until):
    layout = Layout.grid(dp=2, pp=1, tp=1, layers=8)
    job = job_of(layout, 4)
    batch = slowed(records(job, lengths=True, spread=0.1, steps=20), [0], 14, 1.6)
    batch = batch.select((batch.rank == 0) | (batch.step < until))
    device = StepReplay.of(job, layout, [batch]).effects.device[0, 0, 0, :, 0]
    assert device[:14] == pytest.approx(1.0, abs=0.03)
    assert device[14:] == pytest.approx(1.6, abs=0.05)


@pytest.mark.parametrize("layout", [UNEVEN[0], UNEVEN[3]])
def test_few_good_steps_of_a_group_that_holds_as_no_other_does_are_enough(layout):
    """Four of twenty, as soon after a plan."""
    job = job_of(layout, 4)
    batch = records(job, lengths=True, spread=0.1, steps=20)
    device = StepReplay.of(job, layout, [in_parts(batch, layout)]).effects.device
    assert np.abs(device - 1.0).max() < 0.005
    stage = layout.replicas[1].stages[0]
    found = StepReplay.of(job, layout, [in_parts(slowed(batch, stage.ranks, 4), layout)])
    device = found.effects.device[0, 0, 1, :, 0]
    assert device[:4] == pytest.approx(1.0, abs=0.03)
    assert device[4:] == pytest.approx(1.5, abs=0.05)
    assert found.lost_ms[Cause.DEVICE] > 0.05 * found.step_ms


def test_a_time_as_long_as_a_record_may_hold_is_no_error():
    layout = UNEVEN[3]
    job = job_of(layout, 4)
    batch = records(job)
    longest = np.arange(len(batch)) == np.flatnonzero(batch.rank == 1)[-1]
    batch = replace(batch, compute_ms=np.where(longest, 9e14, batch.compute_ms))
    assert StepReplay.of(job, layout, [batch]).step_ms > 0.0


def test_a_known_device_that_was_given_less_costs_nothing():
    layout = UNEVEN[3]
    job = job_of(layout, 4)
    batch = in_parts(records(job, slow={1: 1.5}, noise=0.0), layout)
    verdict = Verdict(rank=1, status=Status.FAIL_SLOW, slowdown=1.5, since_step=2)
    found = StepReplay.of(job, layout, [batch], SlowDevice.named([verdict], layout))
    assert found.effects.device == pytest.approx(1.0)
    assert found.lost_ms[Cause.DEVICE] == pytest.approx(0.0, abs=1e-9)


def of_host(rank, layout, *, by_host=True):
    verdict = Verdict(rank=rank, status=Status.FAIL_SLOW, slowdown=1.5, since_step=2)
    return SlowDevice.named([verdict], layout, by_host={rank} if by_host else ())[0]


def test_what_a_slow_rank_costs_is_its_hosts_if_that_holds_it_back():
    layout = Layout.grid(dp=4, pp=2, tp=1, layers=4)
    job = job_of(layout, 4)
    batch = records(job, slow={3: 1.5})
    device = costs_of(job, layout, [batch], [of_host(3, layout, by_host=False)])
    host = costs_of(job, layout, [batch], [of_host(3, layout)])
    assert device.lost[Cause.DEVICE] > 0.1 * device.step
    assert host.lost[Cause.DEVICE] == 0.0
    moved = device.lost[Cause.DEVICE] + device.lost[Cause.HOST]
    assert host.lost[Cause.HOST] == pytest.approx(moved)
    assert host.by_host == pytest.approx(device.lost[Cause.DEVICE])
    assert (host.step, host.slowdown) == (device.step, device.slowdown)
    assert diagnose(job, layout, [batch], [of_host(3, layout)]).root_cause is Cause.HOST


def test_of_a_slow_host_and_a_slow_device_each_pays_its_part():
    layout = Layout.grid(dp=4, pp=1, tp=1, layers=4)
    job = job_of(layout, 4)
    batch = records(job, slow={1: 1.5, 3: 1.5})
    both = [of_host(1, layout), of_host(3, layout, by_host=False)]
    costs = costs_of(job, layout, [batch], both)
    assert costs.lost[Cause.HOST] == pytest.approx(costs.lost[Cause.DEVICE], rel=0.05)
    lines = diagnose(job, layout, [batch], both).detail
    assert any("Rank 1" in line and "holds it back" in line for line in lines)
    assert any("Rank 3" in line and "check the device" in line for line in lines)


@pytest.mark.parametrize("pp", [1, 2])
def test_microbatches_that_a_replica_did_not_run_in_a_step_count_as_none(pp):
    """Of 16 a step, the replicas run 12 and 4, 8 and 8, then 4 and 12."""
    layout = Layout.grid(dp=2, pp=pp, tp=1, layers=4)
    job = Job(name="made up", layout=layout, microbatches=24)
    batch = records(job, steps=6, noise=0.0)
    replica = np.array([place.dp for place in sorted(layout.places(), key=lambda p: p.rank)])
    own = np.array([[12, 4], [8, 8], [4, 12]])[batch.step % 3, replica[batch.rank]]
    fewer = batch.select(batch.microbatch < own)
    costs = costs_of(job, layout, [fewer])
    assert costs.step == pytest.approx(((12 + 8 + 12) / 3 + pp - 1) * 30.0)
    assert costs.ideal == pytest.approx(costs.step)
    assert diagnose(job, layout, [fewer]).root_cause is Cause.NONE


@pytest.mark.parametrize("recorded", [(0,), (0, 4, 8, 12), (0, 1, 2, 3)])
def test_stages_without_records_make_no_slowdown(recorded):
    layout = Layout.grid(dp=4, pp=4, tp=1, layers=4)
    job = job_of(layout, 4)
    batch = records(job, noise=0.0)
    ranks = batch.select(np.isin(batch.rank, recorded))
    batches = [ranks, replace(ranks, op=np.full(len(ranks), Op.OPTIMIZER))]
    assert costs_of(job, layout, batches).slowdown == pytest.approx(1.0)
