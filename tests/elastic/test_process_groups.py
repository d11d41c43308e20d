"""The contract of `Communicators`, on every maker: gloo, torch's reconfigure API, NCCL's stand-in.

Ranks are threads here; `test_process_group_faults.py` has processes that die.
"""

from __future__ import annotations

import doctest
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from resihp.contracts import ContractError, PeerLostError
from resihp.elastic import Replicas
from resihp.elastic.process_groups import communicators, nccl, selection
from resihp.elastic.process_groups import reconfigure as reconfigure_module
from resihp.elastic.process_groups.abortable import (
    AbortableProcessGroup,
    ProcessGroupFactory,
    WaitClock,
    close_groups,
)
from resihp.elastic.process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice
from resihp.elastic.process_groups.communicators import CPU, Communicators, at_once
from resihp.elastic.process_groups.gloo import GlooCommunicators
from resihp.elastic.process_groups.nccl import NcclCommunicators, version_refusal
from resihp.elastic.process_groups.reconfigure import ReconfigurableCommunicators
from resihp.elastic.process_groups.selection import VARIABLE, select_communicators
from resihp.elastic.process_groups.staged import StagedGlooCommunicators
from resihp.elastic.rendezvous.environment import Environment
from resihp.elastic.trainer import Trainer
from tests.elastic.engine_job import ALONE, plan, small_setup
from tests.elastic.held import held
from tests.elastic.late_copies import LateCommunicators
from tests.elastic.nccl_stand_in import (
    StandInNccl,
    StandInNccl2,
    get_reconfigure_handle,
    reconfigure,
)

T = TypeVar("T")
Maker = type[Communicators]
TRIO = (0, 1, 2)
PATIENCE = timedelta(seconds=60)
SHORT = timedelta(seconds=1)
CYCLES = 50
NO_RECONFIGURE = ReconfigurableCommunicators.refusal(CPU)


class DeviceCommunicators(ReconfigurableCommunicators):
    """Those of a CUDA device, whatever the factory's is."""

    name = "reconfigure on a device"

    def __init__(self, store: dist.Store, device: torch.device, **options: Any) -> None:
        super().__init__(store, torch.device("cuda", 0), **options)


@pytest.fixture(
    params=[
        GlooCommunicators,
        pytest.param(
            ReconfigurableCommunicators,
            marks=pytest.mark.skipif(NO_RECONFIGURE is not None, reason=str(NO_RECONFIGURE)),
        ),
        LateCommunicators,
        DeviceCommunicators,
        NcclCommunicators,
    ],
    ids=lambda maker: maker.name,
)
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Those of devices are made of stand-ins, whatever this torch has."""
    if is_of_a_device(request.param):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", StandInNccl, raising=False)
        monkeypatch.setattr(StandInNccl, "mistakes", [])
        monkeypatch.setattr(request.param, "_event_behind", lambda self, work: work)
        create = request.param._create

        def create_sibling(self: Communicators, *arguments: Any) -> Any:
            communicator = create(self, *arguments)
            communicator.siblings = lambda: tuple(self._open)
            return communicator

        monkeypatch.setattr(request.param, "_create", create_sibling)
        for name in (
            "ASYNC_ERROR_HANDLING",
            "ENABLE_MONITORING",
            "NONBLOCKING_TIMEOUT",
            "WAIT_TIMEOUT_DUMP_MILSEC",
        ):
            monkeypatch.setenv(f"TORCH_NCCL_{name}", "0")  # restored after the test
    if request.param is DeviceCommunicators:
        monkeypatch.setattr(dist, "ProcessGroupNCCL2", StandInNccl2, raising=False)
        monkeypatch.setattr(dist, "_reconfigure", reconfigure, raising=False)
        monkeypatch.setattr(dist, "_get_reconfigure_handle", get_reconfigure_handle, raising=False)
        monkeypatch.setattr(reconfigure_module, "current_device", nullcontext)
    yield request.param
    if is_of_a_device(request.param):
        gc.collect()
        assert not StandInNccl.mistakes


def is_of_a_device(maker: Maker) -> bool:
    return maker in (DeviceCommunicators, NcclCommunicators)


class Job:
    """Ranks as threads, with one factory for each rank and generation."""

    def __init__(self, maker: Maker) -> None:
        self._maker, self._store, self._generations = maker, dist.HashStore(), 0

    def generation(
        self,
        ranks: Collection[int] = TRIO,
        *,
        timeout: timedelta = PATIENCE,
        connect: timedelta = PATIENCE,
        broken: Callable[[Sequence[int], float], str | None] = lambda ranks, waited_s: None,
    ) -> Generation:
        self._generations += 1
        factories = {
            rank: ProcessGroupFactory(
                self._store,
                rank,
                broken=broken,
                timeout=timeout,
                connect=connect,
                waited=WaitClock(),
                maker=self._maker,
            )
            for rank in ranks
        }
        return Generation(f"generation{self._generations}", factories)


class Generation:
    def __init__(self, name: str, factories: dict[int, ProcessGroupFactory]) -> None:
        self.name, self.factories = name, factories
        self._pool = ThreadPoolExecutor(2 * len(factories))

    def start(
        self, work: Callable[[ProcessGroupFactory], T], ranks: Collection[int] = ()
    ) -> dict[int, Future[T]]:
        """What `work` returns for each rank."""
        return {
            rank: self._pool.submit(work, self.factories[rank]) for rank in ranks or self.factories
        }

    def run(
        self, work: Callable[[ProcessGroupFactory], T], ranks: Collection[int] = ()
    ) -> dict[int, T]:
        return results(self.start(work, ranks))

    def group(
        self, ranks: Sequence[int] = (), name: str = "all"
    ) -> dict[int, AbortableProcessGroup]:
        members = tuple(ranks or self.factories)
        return self.run(lambda factory: factory.group(f"{self.name}/{name}", members), members)

    def abandon(self) -> None:
        """Close all groups, whatever is in progress in them."""
        for factory in self.factories.values():
            factory.abort()
        self.close()

    def close(self) -> None:
        """Close all groups, in which nothing is in progress."""
        close_groups([group for f in self.factories.values() for group in f.groups])
        await_closed()
        self.assert_closed()
        self._pool.shutdown()

    def assert_closed(self) -> None:
        assert [factory.communicators.open_handles for factory in self.factories.values()] == [
            0
        ] * len(self.factories)


def results(futures: dict[int, Future[T]]) -> dict[int, T]:
    return {rank: f.result(PATIENCE.total_seconds()) for rank, f in futures.items()}


def await_closed() -> None:
    for thread in threading.enumerate():
        if thread.name == "resihp-close":
            thread.join(PATIENCE.total_seconds())
            assert not thread.is_alive(), "a group is not closed"


def summed(groups: dict[int, AbortableProcessGroup], generation: Generation) -> list[float]:
    """The sum of the ranks in each group's exchange, seen from each of its ranks."""

    def work(factory: ProcessGroupFactory) -> float:
        return groups[factory.rank].all_reduce(torch.tensor([float(factory.rank)])).item()

    return list(generation.run(work, groups).values())


def test_every_exchange_of_the_runtime(maker: Maker) -> None:
    generation = Job(maker).generation()
    groups = generation.group((2, 0, 1))

    def work(factory: ProcessGroupFactory) -> None:
        group, rank = groups[factory.rank], float(factory.rank)
        assert group.all_reduce(torch.full((3,), rank)).tolist() == [3.0] * 3
        assert group.all_reduce_max(torch.tensor([rank, -rank])).tolist() == [2.0, 0.0]
        assert [one.item() for one in group.all_gather(torch.tensor([rank]))] == [2.0, 0.0, 1.0]
        for source in TRIO:
            sent = torch.full((2, 2), rank, dtype=torch.float64)
            assert group.broadcast(sent, source).unique().item() == source
        received = torch.zeros(3)
        group.all_to_all(received, torch.full((3,), rank), [1, 1, 1], [1, 1, 1])
        assert received.tolist() == [2.0, 0.0, 1.0]
        works = [(torch.full((257,), rank + number), number) for number in range(20)]
        for tensor, number, started in [(t, n, group.start_all_reduce(t)) for t, n in works]:
            group.wait(started)
            assert tensor.unique().item() == 3 + 3 * number
        assert group.is_idle

    generation.run(work)
    generation.close()


def test_sums_of_gradients_that_are_whole_are_told_from_those_that_are_not(maker: Maker) -> None:
    """An exchange that an abort ends is over, and has failed."""
    generation = Job(maker).generation()
    groups = generation.group()

    def exchange(factory: ProcessGroupFactory) -> BucketedAllReduce:
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), float(factory.rank))
        return BucketedAllReduce([(groups[factory.rank], [GradientSlice(parameter)])], 1)

    def whole(factory: ProcessGroupFactory) -> list[list[float]]:
        bucketed = exchange(factory)
        assert bucketed.summed() == []
        for _ in bucketed.finish():
            pass
        return [flat.tolist() for flat in bucketed.summed()]

    assert list(generation.run(whole).values()) == [[[3.0] * 3]] * 3
    alone = exchange(generation.factories[0])
    alone.start()
    assert alone.summed() == []
    generation.run(ProcessGroupFactory.abort)
    assert alone.summed() == []
    generation.close()


def test_a_group_of_one_exchanges_with_nobody(maker: Maker) -> None:
    generation = Job(maker).generation((4,))
    group = generation.group()[4]
    assert group.all_reduce(torch.ones(1)).item() == group.all_gather(torch.ones(1))[0].item() == 1
    generation.close()


CHANGES = {
    "identity": [[TRIO], [TRIO]],
    "shrink, last": [[TRIO], [(0, 1)]],
    "shrink, middle": [[TRIO], [(0, 2)]],
    "shrink, first, then grow in another order": [[TRIO], [(2, 1)], [(1, 0, 2)]],
    "grow from one": [[(1,)], [TRIO]],
    "split, then merge": [[TRIO], [(0,), (1, 2)], [TRIO]],
    "again and again": [[TRIO], [(1, 2)], [TRIO], [(0, 2)], [TRIO]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_world_is_built_beside_the_running_one(change: str, maker: Maker) -> None:
    """Both exchange until the old one is closed."""
    job, before = Job(maker), None
    for number, partition in enumerate(CHANGES[change]):
        ranks = [rank for part in partition for rank in part]
        generation = job.generation(ranks)
        groups: dict[int, AbortableProcessGroup] = {}
        for part in partition:
            groups |= generation.group(part, f"world{number}")
        for of, world in [(groups, generation), *([before] if before else [])]:
            assert set(summed(of, world)) <= {float(sum(group.ranks)) for group in of.values()}
        if before is not None:
            before[1].close()
            assert len(set(summed(groups, generation))) == len(partition)
        before = (groups, generation)
    assert before is not None
    before[1].close()


def test_a_world_is_built_while_an_exchange_of_another_waits(maker: Maker) -> None:
    job = Job(maker)
    running, following = job.generation(), job.generation()
    groups = running.group()
    waiting = running.start(
        lambda factory: groups[factory.rank].all_reduce(torch.ones(1)).item(), (0, 1)
    )
    assert summed(following.group(), following) == [3.0] * 3
    assert not any(future.done() for future in waiting.values())
    last = running.run(lambda factory: groups[2].all_reduce(torch.ones(1)).item(), (2,))
    assert {*results(waiting).values(), *last.values()} == {3.0}
    running.close()
    following.close()


def test_a_late_joiner_is_waited_for(maker: Maker) -> None:
    generation = Job(maker).generation()
    early = generation.start(lambda factory: factory.group("late", TRIO), (0, 2))
    time.sleep(0.2)
    assert not any(future.done() for future in early.values())
    late = generation.run(lambda factory: factory.group("late", TRIO), (1,))
    assert summed(results(early) | late, generation) == [3.0] * 3
    generation.close()


def test_a_rank_that_does_not_come_ends_the_build_of_the_others(maker: Maker) -> None:
    """They hold nothing of it, and build without that rank."""
    job = Job(maker)
    generation = job.generation(TRIO, connect=SHORT)
    building = generation.start(lambda factory: factory.group("incomplete", TRIO), (0, 1))
    for future in building.values():
        with pytest.raises(RuntimeError):
            future.result(PATIENCE.total_seconds())
    generation.assert_closed()
    following = job.generation((0, 1))
    assert summed(following.group(), following) == [1.0, 1.0]
    following.close()


def test_an_abort_ends_a_build(maker: Maker) -> None:
    """At the latest with its time-out, where the backend cannot be interrupted."""
    generation = Job(maker).generation(TRIO, timeout=SHORT, connect=SHORT)
    building = generation.start(lambda factory: factory.group("aborted", TRIO), (0, 1))
    for rank, future in building.items():
        generation.factories[rank].abort()
        with pytest.raises((PeerLostError, RuntimeError)):
            future.result(PATIENCE.total_seconds())
        with pytest.raises(PeerLostError, match="aborted"):
            generation.factories[rank].group("afterwards", (rank,))
    generation.assert_closed()


def test_a_reason_to_stop_ends_a_build_that_can_be_interrupted(maker: Maker) -> None:
    if issubclass(maker, GlooCommunicators):
        pytest.skip("a constructor of gloo cannot be interrupted")
    reasons = ["rank 2 is dead"]
    generation = Job(maker).generation(broken=lambda ranks, waited_s: reasons[0])
    with pytest.raises(PeerLostError, match="rank 2 is dead"):
        generation.factories[0].group("stopped", TRIO)
    generation.assert_closed()


def test_an_abort_from_another_thread_ends_waits_of_its_own_generation(maker: Maker) -> None:
    job = Job(maker)
    broken, running = job.generation(), job.generation()
    groups, others, beside = broken.group(), broken.group((0, 1), "pair"), running.group()

    def wait(factory: ProcessGroupFactory) -> None:
        with pytest.raises(PeerLostError):
            groups[factory.rank].all_reduce(torch.ones(8))  # rank 2 takes no part

    def wait_in_pair(factory: ProcessGroupFactory) -> None:
        with pytest.raises(PeerLostError):
            others[0].all_reduce(torch.ones(8))  # rank 1 takes no part

    waiting = broken.start(wait, (0, 1))
    in_pair = broken.start(wait_in_pair, (0,))
    while groups[0].is_idle or groups[1].is_idle or others[0].is_idle:
        time.sleep(0.001)
    aborts = [threading.Thread(target=broken.factories[0].abort) for _ in range(4)]
    for thread in aborts:
        thread.start()
    for thread in aborts:
        thread.join(PATIENCE.total_seconds())
    results({0: waiting[0]})
    results(in_pair)
    with pytest.raises(PeerLostError):
        groups[0].all_reduce(torch.ones(8))
    assert summed(beside, running) == [3.0] * 3
    broken.factories[1].abort()
    results(waiting)
    broken.abandon()
    running.close()


def test_every_wait_asks_for_reasons_to_stop(maker: Maker) -> None:
    asked: list[tuple[tuple[int, ...], float]] = []

    def broken(ranks: Sequence[int], waited_s: float) -> str | None:
        asked.append((tuple(ranks), waited_s))
        return "enough" if len(asked) > 3 and waited_s > 0 else None

    generation = Job(maker).generation((0, 1), broken=broken)
    groups = generation.group()
    asked.clear()
    with pytest.raises(PeerLostError, match="enough"):
        groups[0].all_reduce(torch.ones(1))
    assert [ranks for ranks, _ in asked] == [(0, 1)] * 4
    assert [waited_s for _, waited_s in asked] == sorted(waited_s for _, waited_s in asked)
    generation.abandon()


def test_an_exchange_has_a_time_out(maker: Maker) -> None:
    generation = Job(maker).generation((0, 1), timeout=SHORT)
    groups = generation.group()
    with pytest.raises(PeerLostError):
        groups[0].all_reduce(torch.ones(1))
    generation.abandon()


def test_close_waits_for_no_peer(maker: Maker) -> None:
    """One rank closes while the others do not; then they find out that it has left."""
    generation = Job(maker).generation()
    groups = generation.group()
    assert summed(groups, generation) == [3.0] * 3
    for factory in generation.factories.values():
        factory._timeout = SHORT  # from now on: before, each rank may begin as late as it likes
    close_groups([groups[1]])
    await_closed()
    assert generation.factories[1].communicators.open_handles == 0
    for rank in (0, 2):
        with pytest.raises(PeerLostError):
            groups[rank].all_reduce(torch.ones(1))
        generation.factories[rank].abort()
    close_groups([groups[0], groups[2]])
    await_closed()
    generation.assert_closed()


def test_many_generations_leave_nothing_behind(maker: Maker) -> None:
    """Every other one is aborted in the middle of an exchange."""
    job = Job(maker)

    def cycle(number: int) -> None:
        generation = job.generation((0, 1))
        groups = generation.group()
        assert summed(groups, generation) == [1.0, 1.0]
        if number % 2:
            groups[0].start_all_reduce(torch.ones(1))
            generation.abandon()
        else:
            generation.close()
        del groups, generation
        gc.collect(1)  # a generation refers to itself

    for number in range(4):
        cycle(number)
    before = held()
    for number in range(CYCLES):
        cycle(number)
    if is_of_a_device(maker):
        return  # the stand-in's aborted exchanges end when gloo's time-out does
    gc.collect()  # those that have grown old meanwhile
    await_passing(lambda: not added(before))
    assert not added(before)


def added(before: dict[str, Any]) -> Counter[str]:
    """Files and threads that there are now and were not before; those of earlier tests may end."""
    now = held()
    return sum(
        (Counter(now[kind]) - Counter(before[kind]) for kind in ("files", "threads")), Counter()
    )


def await_passing(is_over: Callable[[], bool]) -> None:
    """gloo closes a connection at the next tick of its loop."""
    deadline = time.monotonic() + 60
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.01)


# The choice.


def test_gloo_is_the_default_on_the_cpu() -> None:
    assert select_communicators(CPU, {}) is GlooCommunicators
    assert select_communicators(CPU, {VARIABLE: "gloo"}) is GlooCommunicators


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match="is 'mpi'; known: gloo, reconfigure, nccl, staged"):
        select_communicators(CPU, {VARIABLE: "mpi"})


@pytest.mark.parametrize(
    ("name", "reason"), [("nccl", "not those of cpu"), ("gloo", "CPU tensors")]
)
def test_what_the_device_lacks_is_said(name: str, reason: str) -> None:
    device = CPU if name == "nccl" else torch.device("cuda", 0)
    with pytest.raises(ContractError, match=f"no process groups for .*{name}: .*{reason}"):
        select_communicators(device, {VARIABLE: name})


def test_a_device_without_index_is_refused() -> None:
    """It would be another one in each thread."""
    for name in ("", "staged"):
        with pytest.raises(ContractError, match="device: has no index"):
            select_communicators(torch.device("cuda"), {VARIABLE: name})


def test_exchanges_through_the_host_are_warned_of_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(NcclCommunicators, "refusal", lambda device: "NCCL 2.28.5 crashes in abort")
    monkeypatch.setattr(ReconfigurableCommunicators, "refusal", lambda device: "torch is too old")
    selection._warn_of_host.cache_clear()
    device = torch.device("cuda", 1)
    assert select_communicators(device, {VARIABLE: "staged"}) is StagedGlooCommunicators
    assert caplog.messages == []
    for _ in range(2):
        assert select_communicators(device, {}) is StagedGlooCommunicators
    assert caplog.messages == [
        "tensors of cuda:1 are exchanged through the host (staged): gloo: gloo exchanges CPU "
        "tensors, not those of cuda:1; reconfigure: torch is too old; nccl: NCCL 2.28.5 crashes in "
        "abort"
    ]


def test_what_torch_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "_reconfigure", raising=False)
    with pytest.raises(ContractError, match=r"reconfigure: torch .* has no .*_reconfigure"):
        select_communicators(CPU, {VARIABLE: "reconfigure"})


@pytest.mark.skipif(NO_RECONFIGURE is not None, reason=str(NO_RECONFIGURE))
def test_reconfigure_is_chosen_where_torch_has_it() -> None:
    assert select_communicators(CPU, {VARIABLE: "reconfigure"}) is ReconfigurableCommunicators


def test_jobs_and_loops_stop_at_their_start_where_the_choice_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "mpi")
    with pytest.raises(ContractError, match="'mpi'"):
        Trainer(small_setup(), plan(0, ALONE), SimpleNamespace(rank=0), None)  # type: ignore[arg-type]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    environment = Environment(0, 1, "127.0.0.1", 1, "none", hosts_store=False, joins=False)
    with pytest.raises(ContractError, match="'mpi'"):
        Replicas(model, optimizer, microbatches=1, environment=environment)


# NCCL.


def test_examples_of_the_docs_hold() -> None:
    assert doctest.testmod(nccl).attempted
    assert not doctest.testmod(nccl).failed


def test_versions_of_nccl_that_cannot_abort_are_refused_by_name() -> None:
    refused = [(2, 25, 1), *((2, 28, patch) for patch in range(3, 9))]
    for version in refused:
        assert f"NCCL {'.'.join(map(str, version))} " in str(version_refusal(version))
    for version in [(2, 21, 5), (2, 26, 2), (2, 27, 7), (2, 28, 2), (2, 28, 9), (2, 30, 7)]:
        assert version_refusal(version) is None


def test_nccl_is_refused_where_torch_would_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resihp.elastic.process_groups.nccl.nccl_refusal", lambda device: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    assert "would end the process" in str(NcclCommunicators.refusal(torch.device("cuda", 0)))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert NcclCommunicators.refusal(torch.device("cuda", 0)) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_the_stand_ins_have_what_torch_has() -> None:
    """Made on a machine without a device too; a communicator cannot be."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout, options.config.blocking = SHORT, 0
    used = {"abort", "eager_connect_single_device", "rank"}
    used |= {"allreduce", "allgather", "broadcast", "alltoall_base"}
    assert used <= set(dir(StandInNccl)) & set(dir(dist.ProcessGroupNCCL))
    if NO_RECONFIGURE is None:
        options.enable_reconfigure = True
        used |= {"get_reconfigure_handle", "reconfigure"}
        assert used <= set(dir(StandInNccl2)) & set(dir(dist.ProcessGroupNCCL2))


def test_communicators_with_a_lost_peer_are_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other they would wait for each other: the stand-in refuses that."""
    monkeypatch.setattr(StandInNccl, "mistakes", [])
    for name in ("ASYNC_ERROR_HANDLING", "WAIT_TIMEOUT_DUMP_MILSEC"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "0")
    options = StandInNccl.Options()
    options.config.blocking = 0
    worlds = [StandInNccl(dist.HashStore(), 0, 2, options) for _ in range(3)]
    for world in worlds:
        world.siblings = lambda: worlds
        world._gloo = Future()
        world.allreduce([torch.zeros(1)])
    at_once([world.abort for world in worlds], CPU)
    assert all(world.is_aborted for world in worlds)
    assert StandInNccl.mistakes == []
    for world in worlds:
        world._gloo.set_exception(RuntimeError("its peer did not come"))


def test_polls_of_a_device_sleep_only_once_a_wait_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_us, slept = [0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now_us[0] / 1e6, sleep=slept.append)
    monkeypatch.setattr(communicators, "time", clock)

    def query() -> bool:
        now_us[0] += 50
        return now_us[0] > 400

    assert communicators._comes(query, end=1.0)
    assert slept == [0.0] * 3 + [communicators._POLL_S] * 5
    assert not communicators._comes(lambda: False, end=0.0)


def test_an_abort_that_fails_is_told_once_all_have_ended() -> None:
    ended = threading.Event()

    def fail() -> None:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="device is lost"):
        at_once([fail, ended.set], CPU)
    assert ended.is_set()


def test_the_stand_in_refuses_illegal_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot fail is none: each mistake, made on purpose."""
    monkeypatch.setattr(StandInNccl, "mistakes", [])
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    options = StandInNccl.Options()
    with pytest.raises(AssertionError, match="blocking"):
        StandInNccl(dist.HashStore(), 0, 1, options)
    options.config.blocking = 0
    with pytest.raises(AssertionError, match="watchdog"):
        StandInNccl(dist.HashStore(), 0, 1, options)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with pytest.raises(AssertionError, match="watchdog"):
        StandInNccl(dist.HashStore(), 0, 1, options)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")
    alone, other = (StandInNccl(dist.HashStore(), 0, 2, options) for _ in range(2))
    alone.siblings = lambda: [other]
    alone._gloo, other._gloo = Future(), Future()  # their peers do not come before all of this
    work, waiting = (each.allreduce([torch.zeros(1)]) for each in (alone, other))
    for mistake in [
        lambda: work.wait(timedelta(seconds=1)),
        work.wait,
        work.exception,
        work.synchronize,
        alone.shutdown,
    ]:
        with pytest.raises(AssertionError):
            mistake()
    monkeypatch.setattr("tests.elastic.nccl_stand_in.MOST", timedelta(0))
    with pytest.raises(AssertionError, match="kernel of another"):
        alone.abort()
    assert not waiting.is_completed()
    other.abort()
    assert work.is_completed()
    with pytest.raises(AssertionError, match="second"):
        alone.abort()
    with pytest.raises(dist.DistBackendError):
        alone.allreduce([torch.zeros(1)])
    for each in (alone, other):
        each._gloo.set_exception(RuntimeError("its peer did not come"))
