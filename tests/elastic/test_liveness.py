"""Members watch each other on two levels: no living one is taken for lost, every lost one is found.

The logic is the real one, over a store in memory and a made-up clock.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.elastic.rendezvous import host_table, keys, liveness
from resihp.elastic.rendezvous.heartbeats import Heartbeats, prepare
from resihp.elastic.rendezvous.host_table import HostTable
from resihp.elastic.rendezvous.joiners import Joiners
from resihp.elastic.rendezvous.liveness import (
    LOOKS,
    TAKEOVER_LOOKS,
    Beat,
    JobWatcher,
    LivenessSummary,
    LivenessView,
    ProcessHistory,
    SilenceCounter,
    format_processes,
    parse_processes,
)
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, announce_death, connect
from resihp.testing.local_ranks import LocalRanks
from resihp.testing.simulated_members import SimulatedMembers, short_timeouts

TIMEOUTS = short_timeouts(2.0)
TIMEOUT_S, LOOK_S = 2.0, 2.0 / LOOKS
HOSTS, PER_HOST = 3, 3
RANKS = range(HOSTS * PER_HOST)
WARM_S = 1.0  # until all summaries are there
# Of the loss of a rank: the time-out, a look of each level and of the waiting rank, their lateness.
RANK_S = TIMEOUT_S + 4 * LOOK_S
# Of a whole host: HOST_LOOKS looks of the job's watcher, one of the waiting rank, their lateness.
HOST_S = TIMEOUT_S + 5 * LOOK_S
# Added by a watcher that is lost while it is needed.
TAKEOVER_S = (TAKEOVER_LOOKS + 2) * LOOK_S

FEW = settings(max_examples=60, deadline=None)


def members(seed: int = 0) -> SimulatedMembers:
    job = SimulatedMembers(HOSTS, PER_HOST, TIMEOUTS, seed=seed)
    job.run_until(WARM_S)
    return job


def watcher_of_job(job: SimulatedMembers) -> int:
    """Rank of the job's watcher: the one with the most requests of late."""
    before = dict(job.calls)
    job.run_until(job.now_s + 2 * LOOK_S)
    return max(job.ranks, key=lambda rank: job.calls[rank] - before[rank])


@given(st.lists(st.integers(0, 2), max_size=40))
def test_only_lasting_silence_counts(more: list[int]) -> None:
    """Each entry: heartbeats between two looks."""
    counter, beats, quiet = SilenceCounter[str](), 0, 0
    counter.look("a", beats)
    for number in more:
        beats, quiet = beats + number, 0 if number else quiet + 1
        assert counter.look("a", beats) == quiet


@given(st.dictionaries(st.integers(0, 40), st.integers(0, 2)), st.integers(0, 9))
def test_summaries_survive_the_store(processes: dict[int, int], count: int) -> None:
    assert parse_processes(format_processes(processes)) == processes
    summary = LivenessSummary(count, "host", processes, dict(list(processes.items())[:3]))
    assert LivenessSummary.decode(summary.encode().encode()) == summary


@given(st.lists(st.tuples(st.sampled_from("eid"), st.integers(0, 3)), max_size=12))
def test_only_what_follows_the_last_invitation_counts(events: list[tuple[str, int]]) -> None:
    """It may be written more than once ("d"), by members that are late."""
    numbers, raw = Counter[int](), ","
    for kind, rank in events:
        numbers[rank] += kind == "i"
        is_end = kind == "e"
        raw += (
            ProcessHistory.end(rank) if is_end else ProcessHistory.invitation(rank, numbers[rank])
        )
    history = ProcessHistory(raw.encode())
    for rank in range(4):
        own = [kind for kind, of in events if of == rank and kind != "d"]
        assert (rank in history.dead) == (own[-1:] == ["e"])
        number = own.count("i")
        old = LivenessSummary(1, "host", {rank: number - 1}, {rank: number - 1})
        new = LivenessSummary(1, "host", {rank: number}, {rank: number})
        if number and rank not in history.dead:
            assert (rank in LivenessView(old, history).lost) is False
        assert rank in LivenessView(new, history).lost


@FEW
@given(st.integers(0, 99), st.data())
def test_no_living_rank_is_lost_however_others_are_suspended(
    seed: int, data: st.DataObject
) -> None:
    """Any ranks, watchers and whole hosts too, for almost the time-out, again and again."""
    job, longest_s = members(seed), TIMEOUT_S - 2 * TIMEOUTS.poll.total_seconds()
    for _ in range(data.draw(st.integers(1, 4))):
        ranks = data.draw(st.sets(st.sampled_from(RANKS), min_size=1))
        until_s = job.now_s + data.draw(st.floats(0.05, longest_s))
        job.stop(ranks)
        awake = [rank for rank in RANKS if rank not in ranks]
        while job.now_s < until_s:
            job.run_until(min(until_s, job.now_s + LOOK_S))
            assert not any(job.lost(rank) for rank in awake)
        job.resume(ranks)
        for _ in range(data.draw(st.integers(1, LOOKS))):
            job.run_until(job.now_s + LOOK_S)
            assert not any(job.lost(rank) for rank in RANKS)


@FEW
@given(st.integers(0, 99), st.data())
def test_every_lost_rank_is_found_in_bounded_time_and_no_other(
    seed: int, data: st.DataObject
) -> None:
    """Any number at any times: watchers of hosts and of the job, whole hosts, several at once."""
    job, dead = members(seed), set[int]()
    losses = data.draw(
        st.lists(st.sets(st.sampled_from(RANKS), min_size=1), min_size=1, max_size=3)
    )
    for ranks in losses:
        if len(dead | ranks) < len(RANKS):
            job.stop(ranks)
            dead |= ranks
        job.run_until(job.now_s + data.draw(st.floats(0.0, TIMEOUT_S / 4)))
        assert all(job.lost(rank) <= dead for rank in RANKS if rank not in dead)
    bound_s = job.now_s + HOST_S + 2 * len(losses) * TAKEOVER_S
    while job.now_s < bound_s:
        job.run_until(job.now_s + LOOK_S)
        assert all(job.lost(rank) <= dead for rank in RANKS if rank not in dead)
    assert all(job.lost(rank) == dead for rank in RANKS if rank not in dead)


@pytest.mark.parametrize("seed", range(5))
def test_delays_of_single_losses(seed: int) -> None:
    """Of a rank that watches nothing, of a host's watcher, of the job's, and of a whole host."""
    job = members(seed)
    other = next(r for r in (1, 4, 7) if r != watcher_of_job(job))
    for ranks, bound_s in (({other}, RANK_S), ({3}, RANK_S + TAKEOVER_S), ({6, 7, 8}, HOST_S)):
        job = members(seed)
        job.stop(ranks)
        start_s = job.now_s
        while job.lost(0) != ranks:
            job.run_until(job.now_s + LOOK_S / 4)
            assert job.now_s - start_s <= bound_s
        assert job.now_s - start_s >= TIMEOUT_S - 2 * TIMEOUTS.poll.total_seconds()
    job = members(seed)
    ranks = {watcher_of_job(job)}
    job.stop(ranks)
    start_s, observer = job.now_s, min(set(RANKS) - ranks)
    while job.lost(observer) != ranks:
        job.run_until(job.now_s + LOOK_S / 4)
        assert job.now_s - start_s <= RANK_S + 2 * TAKEOVER_S


@pytest.mark.parametrize("seed", range(5))
def test_the_end_of_a_process_is_known_long_before_the_time_out(seed: int) -> None:
    """Of any but those of a whole host: a look of each level and of the waiting rank."""
    for rank in RANKS:
        job = members(seed)
        is_needed = rank == watcher_of_job(job)
        job.kill({rank})
        bound_s = job.now_s + 4 * LOOK_S + is_needed * TAKEOVER_S
        observer = (rank + 1) % len(RANKS)
        while job.lost(observer) != {rank}:
            assert job.now_s <= bound_s
            job.run_until(job.now_s + LOOK_S / 4)
        job.run_until(job.now_s + RANK_S)
        assert job.lost(observer) == {rank}


def test_a_watcher_that_comes_back_finds_its_place_taken() -> None:
    job = members()
    first = watcher_of_job(job)
    job.stop({first})
    job.run_until(job.now_s + TIMEOUT_S / 2)
    second = watcher_of_job(job)
    assert second != first
    job.resume({first})
    job.run_until(job.now_s + LOOK_S)
    job.calls.clear()
    job.run_until(job.now_s + 10 * LOOK_S)
    assert [rank for rank in RANKS if job.calls[rank] > 25] == [second]


def test_of_two_processes_of_a_rank_the_later_counts_and_else_the_living() -> None:
    """A rank has moved to another host, or is listed by its old host as well."""

    def state(*hosts: tuple[int, bool]) -> LivenessSummary:
        watcher = JobWatcher("host")
        watcher.written(LivenessSummary(7, "host"), b"7|host||")
        summaries = {
            f"host{index}": LivenessSummary(1, "0", {3: number}, {3: number} if silent else {})
            for index, (number, silent) in enumerate(hosts)
        }
        return watcher.look({host: each.encode().encode() for host, each in summaries.items()})

    for silent, living in (((0, True), (0, False)), ((0, True), (1, False))):
        for hosts in ((silent, living), (living, silent)):
            assert (state(*hosts).present, state(*hosts).silent) == ({3: living[0]}, {})
    for hosts in (((0, False), (1, True)), ((1, True), (0, False))):
        assert (state(*hosts).present, state(*hosts).silent) == ({3: 1}, {3: 1})


def test_requests_do_not_grow_with_the_job() -> None:
    for hosts in (2, 8, 32):
        job = SimulatedMembers(hosts, 4, TIMEOUTS)
        job.run_until(WARM_S)
        job.calls.clear()
        looks = 10
        job.run_until(job.now_s + looks * LOOK_S)
        watchers = sorted((job.calls[rank] for rank in job.ranks), reverse=True)
        assert watchers[0] <= 4 * (looks + 1)
        assert all(calls <= 2 * (looks + 1) for calls in watchers[1:hosts])
        assert sum(watchers[hosts:]) == 0
        job.calls.clear()
        assert job.lost(1) == set()
        assert job.calls[1] == 1


def test_a_rank_that_never_started_is_waited_for_until_it_is_overdue() -> None:
    job = members()
    missing = len(RANKS)
    connect_s = TIMEOUTS.connect.total_seconds()
    member = job.members[0]
    assert member.silent(job.store, (0, 1, missing), connect_s - 1, 9) == []
    assert member.silent(job.store, (0, 1, missing), connect_s + 1, 9) == [missing]


def test_an_invited_rank_starts_afresh_whatever_is_known_of_its_predecessor() -> None:
    """Its predecessor is silent; the invitation makes that void, and its own silence is found."""
    job = members()
    job.stop({4})
    job.run_until(job.now_s + RANK_S + TAKEOVER_S)
    assert job.lost(0) == {4}
    job.store.append(keys.PROCESS_HISTORY, ProcessHistory.invitation(4, 1))
    job.run_until(job.now_s + LOOK_S / 100)
    assert job.lost(0) == set()
    job.run_until(job.now_s + RANK_S)
    assert job.lost(0) == set()
    job.enter(4)
    job.resume({4})
    job.run_until(job.now_s + RANK_S)
    assert job.lost(0) == set()
    job.stop({4})
    job.run_until(job.now_s + RANK_S + TAKEOVER_S)
    assert job.lost(0) == {4}


def test_a_joiner_that_two_members_invite_is_known_as_started() -> None:
    """The second one has seen it waiting, too, and writes its invitation when it is a member."""
    job, invitation = members(), ProcessHistory.invitation(4, 1)
    job.store.append(keys.PROCESS_HISTORY, invitation)
    job.enter(4)
    job.store.append(keys.PROCESS_HISTORY, invitation)
    job.run_until(job.now_s + RANK_S)
    overdue_s = TIMEOUTS.connect.total_seconds() + 1
    assert job.members[0].silent(job.store, RANKS, overdue_s, len(RANKS)) == []
    job.store.append(keys.PROCESS_HISTORY, ProcessHistory.end(4))
    job.store.append(keys.PROCESS_HISTORY, invitation)
    job.run_until(job.now_s + RANK_S)
    assert job.lost(0) == {4}


def test_an_announced_death_is_known_at_the_next_look() -> None:
    store = dist.HashStore()
    prepare(store)
    member = Heartbeats(0, TIMEOUTS)
    assert member.silent(store, (0, 1), 0.0, 2) == []
    announce_death(store, 1)
    assert member.silent(store, (0, 1), 0.0, 2) == [1]
    Joiners(store).reset({1: 1})
    assert member.silent(store, (0, 1), 0.0, 2) == []


def test_processes_of_a_host_share_a_table_that_the_last_one_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_table, "_FOLDER", tmp_path)
    first, second = HostTable("job"), HostTable("job")
    other = HostTable("other")
    first.enter(5, 2)
    first.beat(7)
    second.enter(131_071, 0)
    second.beat(1)
    assert first.host == second.host != other.host
    assert first.read() == second.read() == {5: Beat(2, 7), 131_071: Beat(0, 1)}
    assert other.read() == {}
    first.close()
    assert second.read() == {5: Beat(2, 7), 131_071: Beat(0, 1)}, "it has not been killed"
    second.close()
    assert [path.name.rpartition("-")[2] for path in tmp_path.iterdir()] == ["other"]
    abandoned = tmp_path / f"resihp-beats-{os.geteuid()}-killed"
    abandoned.touch()
    HostTable("third")
    assert not abandoned.exists()
    assert len(list(tmp_path.iterdir())) == 2


def wait_in_table(rank: int, host: str, port: int, folder: Path, number: int) -> None:
    host_table._FOLDER = folder
    table = HostTable("job")
    table.enter(rank, number)
    table.beat(1)
    time.sleep(600)


def test_the_kernel_tells_which_processes_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one that is suspended, or that has closed its table; a later process of the rank is
    another one."""
    monkeypatch.setattr(host_table, "_FOLDER", tmp_path)
    table, closed = HostTable("job"), HostTable("job")
    table.enter(2, 0)
    table.beat(1)
    closed.enter(3, 0)
    closed.beat(1)
    with LocalRanks("job", tmp_path / "logs") as ranks:

        def wait_for(seen: dict[int, Beat]) -> None:
            deadline = time.monotonic() + 60
            while table.read() != living | seen:
                assert time.monotonic() < deadline, (table.read(), ranks.logs())
                ranks.poll(0.02)

        living = {2: Beat(0, 1), 3: Beat(0, 1)}
        ranks.start([0, 1], wait_in_table, tmp_path, 4)
        wait_for({0: Beat(4, 1), 1: Beat(4, 1)})
        closed.close()
        ranks.kill(0, signal.SIGSTOP)
        ranks.kill(1)
        wait_for({0: Beat(4, 1), 1: Beat(4, 1, has_ended=True)})
        ranks.kill(0)
        wait_for({0: Beat(4, 1, has_ended=True), 1: Beat(4, 1, has_ended=True)})
        ranks.start([0], wait_in_table, tmp_path, 5)
        wait_for({0: Beat(5, 1), 1: Beat(4, 1, has_ended=True)})


def be_a_member(rank: int, host: str, port: int) -> None:
    Rendezvous(lambda: connect(host, port, "job", TIMEOUTS), rank, (0, 1), TIMEOUTS).start()
    time.sleep(600)


def test_a_killed_process_is_lost_without_any_time_out_or_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LOOKS", 10**9)
    with LocalRanks("job", tmp_path) as ranks:
        here = Rendezvous(lambda: connect(*ranks.address, "job", TIMEOUTS), 0, (0, 1), TIMEOUTS)
        here.start()
        ranks.start([1], be_a_member)
        started = time.monotonic()

        def wait_for(lost: list[int], wait_s: float) -> None:
            while here.lost((0, 1), wait_s) != lost:
                assert time.monotonic() < started + 60, ranks.logs()
                time.sleep(0.02)

        overdue_s = TIMEOUTS.connect.total_seconds() + 60
        wait_for([1], overdue_s)
        wait_for([], overdue_s)
        ranks.kill(1)
        wait_for([1], 1.0)
        here.close()


def test_a_process_that_can_share_no_memory_is_a_host_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_table, "_FOLDER", tmp_path / "missing")
    first, second = HostTable("job"), HostTable("job")
    first.enter(0, 0)
    first.beat(1)
    assert first.host != second.host
    assert (first.read(), second.read()) == ({0: Beat(0, 1)}, {})


def test_ranks_without_shared_memory_watch_each_other() -> None:
    timeouts = Timeouts(heartbeat=timedelta(seconds=2), poll=timedelta(milliseconds=40))
    job = SimulatedMembers(6, 1, timeouts)
    job.run_until(WARM_S)
    job.stop({0, 3})
    job.run_until(job.now_s + HOST_S + 2 * TAKEOVER_S)
    assert job.lost(5) == {0, 3}
