"""Death by silence: never of the living, whatever the network does, and soon of the dead."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.arrays import Floats
from detector.heartbeat import HeartbeatTracker

BEATS, LEARNED = 1500, 100


def arrivals(lost: float, *, jitter: float = 0.0, beats: int = BEATS, seed: int = 0) -> Floats:
    """When beats come that are sent every second: some never, the others late by `jitter`."""
    rng = np.random.default_rng(seed)
    sent = np.arange(1.0, beats + 1.0)
    late = rng.exponential(jitter, beats) if jitter else np.zeros(beats)
    return np.sort((sent + late)[rng.random(beats) >= lost])


def time_outs(at: Floats, heartbeats: HeartbeatTracker | None = None) -> Floats:
    """The time-out after each beat."""
    heartbeats = heartbeats or HeartbeatTracker(floor_s=0.0)
    found = []
    for now in at.tolist():
        heartbeats.beat([0], now)
        found.append(heartbeats.time_out(0))
    return np.array(found)


@pytest.mark.parametrize("lost", [0.01, 0.05, 0.1, 0.2, 0.3])
def test_the_living_die_as_rarely_as_is_stated(lost: float) -> None:
    """A time-out of T seconds is a false death if the next floor(T + 1/2) beats are all lost."""
    outs = np.concatenate([time_outs(arrivals(lost, seed=s))[1:] for s in range(12)])
    assert np.mean(lost ** np.floor(outs + 0.5 - 1e-9)) <= 1e-10


@pytest.mark.parametrize(("lost", "most"), [(0.0, 11), (0.1, 17), (0.2, 23), (0.3, 31)])
def test_the_dead_are_found_within_a_few_beats(lost: float, most: float) -> None:
    for seed in range(12):
        outs = time_outs(arrivals(lost, seed=seed))[LEARNED:]
        assert outs.max() < most
        assert np.median(outs) < 0.8 * most


@given(st.floats(0.05, 600.0), st.floats(0.0, 0.3), st.integers(0, 2**16))
def test_the_time_out_is_a_multiple_of_the_interval(
    interval: float, lost: float, seed: int
) -> None:
    at = arrivals(lost, beats=60, seed=seed)
    boundless = HeartbeatTracker(floor_s=0.0, limit_s=math.inf)
    same = HeartbeatTracker(floor_s=0.0, limit_s=math.inf)
    np.testing.assert_allclose(
        time_outs(interval * at, boundless), interval * time_outs(at, same), rtol=1e-6
    )


@pytest.mark.parametrize("jitter", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("lost", [0.0, 0.1, 0.3])
def test_late_beats_are_no_death(lost: float, jitter: float) -> None:
    for seed in range(6):
        at = arrivals(lost, jitter=jitter, seed=seed)
        outs = time_outs(at, HeartbeatTracker())
        assert (np.diff(at) < outs[:-1]).all()
        assert outs[LEARNED:].max() < 40.0


@given(st.integers(0, 2**16))
def test_beats_at_random_are_waited_for_as_chance_has_it(seed: int) -> None:
    at = np.cumsum(np.random.default_rng(seed).exponential(1.0, 400))
    assert (time_outs(at)[LEARNED:] < 2.0 * 10.0 * math.log(10.0)).all()
    assert (np.diff(at)[LEARNED:] < time_outs(at)[LEARNED:-1]).all()


def test_a_trainer_that_stands_still_now_and_then_gets_its_time_within_the_limit() -> None:
    at = np.concatenate([20.0 * k + np.arange(10.0) for k in range(10)])  # a gap of 11 s each time
    assert time_outs(at)[-1] > 20.0
    assert time_outs(np.append(at, at[-1] + 500.0))[-1] < 70.0  # or 24 mean gaps
    assert time_outs(np.arange(5.0) * 300.0)[-1] > 60.0  # the limit is none for slow senders


def beaten(ranks: Iterable[int], until: float) -> HeartbeatTracker:
    heartbeats = HeartbeatTracker()
    for now in range(int(until)):
        heartbeats.beat(ranks, float(now))
    return heartbeats


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("pause", [30.0, 3000.0])
def test_a_paused_sidecar_finds_all_alive_whom_it_hears_again(ranks: int, pause: float) -> None:
    """It looks after each beat: whoever has not been heard yet since the pause is no less alive."""
    heartbeats, now = beaten(range(ranks), 120.0), 119.0 + pause
    for rank in range(ranks):
        heartbeats.beat([rank], now)
        assert heartbeats.dead(now) == []
        now += 1.0 / ranks


def test_a_silence_of_most_is_held_against_none_even_when_they_come_back_one_by_one() -> None:
    heartbeats = beaten(range(10), 120.0)
    for now in range(120, 180):
        heartbeats.beat(range(4), float(now))
        assert heartbeats.dead(float(now)) == []
    for rank in range(4, 9):
        heartbeats.beat(range(rank + 1), 180.0 + rank)
        assert heartbeats.dead(180.0 + rank) == []
    for now in range(190, 220):
        heartbeats.beat(range(9), float(now))
    assert heartbeats.dead(219.0) == [9]


@pytest.mark.parametrize(("ranks", "failed"), [(2, [1]), (3, [1]), (4, [1]), (4, [1, 2]), (9, [4])])
def test_the_end_of_a_job_after_an_error_is_held_against_none(
    ranks: int, failed: list[int]
) -> None:
    """The launcher kills the others, whose last beats came at different times."""
    heartbeats, others = HeartbeatTracker(), [rank for rank in range(ranks) if rank not in failed]
    for half in range(240):
        for rank in range(ranks):
            heartbeats.beat([rank], half / 2.0 + rank / ranks / 2.0)
    heartbeats.fail(failed)
    for tenth in range(1200, 4000):
        assert heartbeats.dead(tenth / 10.0) == []
    for second in range(400, 520):  # the job is started again, without one rank
        heartbeats.beat([*failed, *others[1:]], float(second))
    if ranks > 2:
        assert heartbeats.dead(519.0) == [others[0]]


def test_after_the_error_of_one_rank_the_death_of_another_is_found() -> None:
    """In a job that goes on without it."""
    heartbeats = beaten(range(8), 120.0)
    heartbeats.fail([7])
    for now in range(120, 180):
        heartbeats.beat(range(6), float(now))
    assert heartbeats.dead(179.0) == [6]


def test_those_who_died_before_do_not_make_the_next_death_look_like_the_network() -> None:
    heartbeats, alive = beaten(range(8), 120.0), list(range(8))
    for round_, victim in enumerate([7, 3, 0, 5, 1, 2]):
        alive.remove(victim)
        for second in range(40):
            now = 120.0 + 40.0 * round_ + second
            heartbeats.beat(alive, now)
            dead = heartbeats.dead(now)
            assert not set(dead) & set(alive)
        assert victim in dead
    heartbeats.beat([7], 400.0)
    assert 7 not in heartbeats.dead(400.0)


def test_whoever_beat_once_may_still_be_starting() -> None:
    heartbeats = HeartbeatTracker()
    heartbeats.beat([0], 0.0)
    assert heartbeats.time_out(0) == heartbeats.time_out(1) == math.inf
    assert heartbeats.dead(1e6) == []


def test_the_state_is_exact() -> None:
    one, other = beaten([0, 4], 50.0), HeartbeatTracker()
    one.beat([9], 60.0)
    other.load(one.state())
    for now in range(60, 120):
        one.beat([9], float(now))
        other.beat([9], float(now))
        assert one.dead(float(now)) == other.dead(float(now))
    assert one.state() == other.state()
    other.forget([0, 4, 9])
    assert other.state()["_senders"] == {}
