"""Layout and name of an instrumented job."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import resihp
from resihp.contracts import Action, Layout, Replica, Schedule, Stage
from resihp.instrumentation._inferred_job import InferredJob, _jobs, job_name
from resihp.instrumentation._parallelism import describe_module
from resihp.layout.rank_groups import RankDescription, layout_of
from tests.hooks.conftest import Sidecar


def described(layout: Layout, chunks: int) -> list[RankDescription]:
    """What each rank of `layout` says of itself."""
    return [
        RankDescription(
            place.rank,
            layout.stage_at(place).ranks,
            tuple(stage.ranks[place.tp] for stage in layout.replicas[place.dp].stages)
            if layout.pp > 1
            else (),
            layout.pp * chunks,
            chunks,
        )
        for place in layout.places()
    ]


@given(
    dp=st.integers(1, 4),
    pp=st.integers(1, 4),
    tp=st.integers(1, 3),
    chunks=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_layout_is_that_of_the_ranks(dp, pp, tp, chunks, random):
    chunks = chunks if pp > 1 else 1
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=pp * chunks, chunks=chunks)
    ranks = described(layout, chunks)
    random.shuffle(ranks)
    assert layout_of(ranks) == layout


def alone(ranks: list[RankDescription], *missing: int) -> list[RankDescription]:
    """The descriptions without what `missing` say of themselves."""
    return [RankDescription(one.rank, (one.rank,)) if one.rank in missing else one for one in ranks]


def test_ranks_that_did_not_describe_themselves_are_placed_by_their_peers():
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=2)
    assert layout_of(alone(described(layout, 1), 3)) == layout


def test_ranks_of_which_nothing_is_known_are_replicas_of_their_own():
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=2)
    replica = layout.replicas[1].ranks
    found = layout_of(alone(described(layout, 1), *replica))
    assert found.replicas[0] == layout.replicas[0]
    assert [one.ranks for one in found.replicas[1:]] == [(rank,) for rank in replica]


def test_job_is_known_after_its_first_step():
    own = RankDescription(0, (0,))
    job = InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=None, microbatches=None)
    assert job.describe(now=False) is None
    job.count(3)
    job.count(7)
    described = job.describe(now=False)
    assert described is not None
    assert (described.name, described.microbatches) == ("j", 3)
    assert described.actions == (Action.NOTIFY,)


@pytest.mark.parametrize(("given", "per_node"), [("4", 4), ("0", 8), ("many", 8), (None, 8)])
def test_ranks_per_node_are_those_of_the_launcher(monkeypatch, given, per_node):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    own = RankDescription(0, (0,))
    job = InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=None, microbatches=1)
    described = job.describe(now=False)
    assert described is not None
    assert described.links.ranks_per_node == per_node


def test_what_is_given_is_not_inferred():
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=8)
    own = RankDescription(0, (0,))
    job = InferredJob("j", own, Schedule.INTERLEAVED, layout=layout, microbatches=6)
    described = job.describe(now=False)
    assert described is not None
    assert (described.layout, described.microbatches) == (layout, 6)


def test_several_chunks_of_a_given_layout_are_interleaved():
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=8, chunks=2)
    own = RankDescription(0, (0,))
    job = InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=layout, microbatches=6)
    described = job.describe(now=False)
    assert described is not None
    assert (described.schedule, described.chunks) == (Schedule.INTERLEAVED, 2)


def test_job_that_ends_in_its_first_step_is_described_as_far_as_known():
    own = RankDescription(0, (0,))
    job = InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=None, microbatches=None)
    described = job.describe(now=True)
    assert described is not None
    assert described.microbatches == 1


@pytest.mark.parametrize(
    ("environment", "script", "name"),
    [
        ({"RESIHP_JOB": "llama", "TORCHELASTIC_RUN_ID": "7"}, "train.py", "llama"),
        ({"TORCHELASTIC_RUN_ID": "7"}, "/home/me/train.py", "train-7"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "train.py", "train"),
        ({}, "", "job"),
        ({"RESIHP_JOB": "team/llama\n" + "x" * 200}, "train.py", "team-llama-" + "x" * 117),
    ],
)
def test_job_name(monkeypatch, environment, script, name):
    for key in ("RESIHP_JOB", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", [script])
    assert job_name() == name


class CountingStore:
    """A store that counts how often each rank's description is read, and what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.reads = self.asked = 0

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        self.reads += 1
        return self.values[key]

    def check(self, keys):
        self.asked += 1
        return all(key in self.values for key in keys)


def test_rank_0_alone_reads_the_descriptions():
    layout, store = Layout.grid(dp=1, pp=2, tp=2, layers=2), CountingStore()
    jobs = []
    for own in described(layout, 1):
        job = InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=None, microbatches=None)
        job._others._store, job._others._world, job._others._is_described = store, 4, False
        job.count(2)
        jobs.append(job)
    first, *others = jobs
    for job in jobs[:3]:
        job._others.publish()
    assert first.describe(now=False) is None  # the last rank has not described itself
    jobs[3]._others.publish()
    assert not any(job.is_described() for job in others)
    assert [job.describe(now=False) for job in others] == [None] * 3
    job = first.describe(now=False)
    assert job is not None
    assert job.layout == layout
    assert all(job.is_described() for job in others)
    assert store.reads == 4


def of_group(store, name: str, rank: int, members: tuple[int, ...]) -> InferredJob:
    """The job on a rank of `members`, of four ranks whose store is `store`, after a step."""
    own = RankDescription(rank, (rank,), members=members)
    job = InferredJob(name, own, Schedule.ONE_F_ONE_B, layout=None, microbatches=None)
    job._others._store, job._others._world, job._others._is_described = store, 4, False
    job.count(3)
    return job


def test_models_on_different_ranks_are_jobs_of_their_own():
    store = CountingStore()
    groups = {"actor": (0, 1), "critic": (2, 3)}
    jobs = [of_group(store, name, rank, ranks) for name, ranks in groups.items() for rank in ranks]
    actor, of_actor, critic, of_critic = jobs
    for job in (critic, of_critic, actor):
        job._others.publish()
    assert critic.describe(now=False) is None  # rank 1 may have the same name
    of_actor._others.publish()
    assert critic.describe(now=False).layout.ranks == (2, 3)
    assert critic.job.microbatches == 6
    assert of_critic.describe(now=False) is None
    assert of_critic.is_described()
    assert not of_actor.is_described()
    assert actor.describe(now=False).layout.ranks == (0, 1)


def test_groups_that_share_a_name_are_one_job():
    store, told = CountingStore(), []
    jobs = [of_group(store, "j", rank, ((0, 2), (1, 3))[rank % 2]) for rank in range(4)]
    for job in jobs:
        job._others.publish()
        job.warn = lambda *warning: told.append(warning)
    first, *others = jobs
    assert [job.describe(now=False) for job in others] == [None] * 3
    assert first.describe(now=False).layout.ranks == (0, 1, 2, 3)
    assert all(job.is_described() for job in others)
    assert len(told) == 2  # by the first rank of each


def test_what_is_given_is_described_by_its_first_rank():
    layout = Layout((Replica((Stage((2,), (0, 1)),)), Replica((Stage((3,), (0, 1)),))))
    jobs = []
    for rank in (0, 2, 3):
        own = RankDescription(rank, (rank,))
        jobs.append(InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=layout, microbatches=2))
    assert [job.describe(now=False) is not None for job in jobs] == [False, True, False]


@pytest.fixture
def world():
    """Function that makes a process group of eight ranks, of which this process is the given one.
    Its collectives do nothing."""
    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    distributed = torch.distributed

    def begin(rank: int = 0) -> None:
        store = distributed.HashStore()
        distributed.init_process_group("fake", store=store, rank=rank, world_size=8)

    yield begin
    distributed.destroy_process_group()


def replicated(*ranks: int) -> torch.nn.Module:
    group = torch.distributed.new_group(ranks)
    return DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)


def sharded(mesh) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(mesh) -> torch.nn.Module:
    return parallelize_module(
        torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()}
    )


def grid(*shape: int):
    names = ("dp", "tp")[: len(shape)]
    ranks = torch.arange(prod(shape)).reshape(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def tensor_parallel_and_sharded(mesh) -> torch.nn.Module:
    model = tensor_parallel(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


MEMBERS = [
    (lambda: torch.nn.Linear(4, 4), ()),
    (lambda: replicated(*range(8)), ()),
    (lambda: replicated(0, 1), (0, 1)),
    (lambda: replicated(0, 4), (0, 4)),
    (lambda: torch.nn.Sequential(replicated(0, 1), replicated(0, 2)), None),
    (lambda: torch.nn.Sequential(replicated(0, 1), tensor_parallel(grid(4))), None),
    (lambda: torch.nn.Sequential(replicated(0, 1), replicated(*range(8))), ()),
    (lambda: sharded(grid(8)), ()),
    (lambda: sharded(grid(4)), (0, 1, 2, 3)),
    (lambda: sharded(grid(2, 4)), ()),
    (lambda: sharded(grid(2, 2)), (0, 1, 2, 3)),
    (lambda: sharded(grid(2, 4)["tp"]), None),
    (lambda: tensor_parallel(grid(4)), None),
    (lambda: tensor_parallel(grid(8)), ()),
    (lambda: tensor_parallel_and_sharded(grid(2, 4)), ()),
    (lambda: tensor_parallel_and_sharded(grid(2, 2)), (0, 1, 2, 3)),
]


def test_ranks_that_train_a_model_are_those_of_its_groups(world):
    world()
    found = [describe_module([model()], 0).members for model, _ in MEMBERS]
    assert found == [members for _, members in MEMBERS]


def test_a_model_of_some_ranks_has_a_job_of_its_own(world, monkeypatch):
    world(rank=2)
    monkeypatch.delenv("RESIHP_JOB", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monitor = resihp.instrument(replicated(2, 3), client=Sidecar(), share_sender=False)
    job = monitor._inferred.describe(now=True)
    monitor.remove()
    monitor.close()
    assert (job.name, job.layout.ranks) == ("train-rank2", (2, 3))


def test_groups_that_do_not_tell_the_ranks_of_a_model_are_told(world, caplog):
    world()
    model = torch.nn.Sequential(replicated(0, 1), replicated(0, 2))
    for layout in (Layout.grid(dp=4, pp=1, tp=1, layers=1), None):
        assert "give `layout=`" not in caplog.text
        monitor = resihp.instrument(
            model, job="j", layout=layout, client=Sidecar(), share_sender=False
        )
        monitor.remove()
        monitor.close()
    assert caplog.text.count("give `layout=`") == 1


def another(store) -> InferredJob:
    """The job on rank 1 of two, whose store is `store`."""
    own = RankDescription(1, (1,))
    job = InferredJob("j", own, Schedule.ONE_F_ONE_B, layout=None, microbatches=2)
    job._others._store, job._others._world, job._others._is_described = store, 2, False
    return job


def test_the_store_is_not_asked_again_once_the_job_is_described():
    store = CountingStore()
    job = another(store)
    assert not job.is_described()
    job._others.mark_described()
    assert [job.is_described() for _ in range(3)] == [True] * 3
    assert store.asked == 2


class LostStore:
    """A store whose host is lost: it raises, or does not answer until `answers` is set."""

    def __init__(self, *, hangs: bool) -> None:
        self.answers, self.asked = threading.Event(), 0
        if not hangs:
            self.answers.set()

    def check(self, keys):
        self.asked += 1
        assert self.answers.wait(300)
        raise torch.distributed.DistNetworkError("Broken pipe")


def test_a_lost_store_is_not_waited_for():
    store = LostStore(hangs=False)
    assert another(store).is_described()
    assert store.asked == 1


def test_a_store_that_does_not_answer_delays_no_more_than_a_late_rank_0(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("resihp.instrumentation._inferred_job.monotonic", lambda: now_s)
    monkeypatch.setattr("resihp.instrumentation._inferred_job._ANSWER_S", 0.001)
    store = LostStore(hangs=True)
    job = another(store)
    try:
        assert [job.is_described() for _ in range(3)] == [False] * 3
        assert store.asked == 1
        now_s = 61.0
        assert job.is_described()
    finally:
        store.answers.set()


WIDE = Layout.grid(dp=1, pp=1, tp=2, layers=1)
DEEP = Layout.grid(dp=1, pp=2, tp=1, layers=2)


@pytest.mark.parametrize("names", [("first", "second"), ("sweep", "sweep")])
def test_models_of_one_process_describe_themselves_apart(tmp_path, names):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        jobs = []
        for layout, name in zip((WIDE, DEEP), names, strict=True):
            for each in described(layout, 1):
                job = InferredJob(name, each, Schedule.ONE_F_ONE_B, layout=None, microbatches=2)
                job._others._world = 2
                jobs.append(job)
                if each.rank == 0:  # the other rank is a process that counts for itself
                    _jobs[job._others._store][name] -= 1
        first, of_first, second, of_second = jobs
        assert second.describe(now=False).layout == DEEP
        assert of_second.is_described()
        assert not of_first.is_described()
        assert first.describe(now=False).layout == WIDE
        assert of_first.is_described()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "warnings"), [(None, 2), (Layout.grid(dp=3, pp=1, tp=1, layers=1), 0)]
)
def test_without_a_process_group_the_ranks_are_those_of_the_launcher(
    monkeypatch, caplog, layout, warnings
):
    monkeypatch.setenv("WORLD_SIZE", "3")
    jobs = []
    for rank in (2, 0):
        monkeypatch.setenv("RANK", str(rank))
        model = torch.nn.Linear(4, 4)
        monitor = resihp.instrument(
            model, job="j", layout=layout, microbatches=6, client=Sidecar(), share_sender=False
        )
        assert monitor.rank == rank
        jobs.append(monitor._inferred.describe(now=False))
        monitor.remove()
        monitor.close()
    other, first = jobs
    assert other is None
    assert first.layout.ranks == (0, 1, 2)
    assert caplog.text.count("all 3 ranks are taken for data-parallel ones") == warnings
