"""Replicas of several processes, sharded or pipelines, are killed at every point of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import Step
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.liveness import ProcessHistory
from tests.elastic.ddp_faults import LoopFault
from tests.elastic.ddp_loops import Loop, Trace, play, train, train_pipeline

STEPS, MICROBATCHES = 6, 9  # unevenly many: what a lost replica leaves is another number
SMALL = 60  # bytes of a bucket: most parameters have one of their own
KINDS: dict[str, Callable[..., None] | None] = {"fsdp2": None, "pipeline": train_pipeline}
WITHIN_STAGES = ("pipeline of fsdp2", "pipeline of tensor parallel")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Each kind of loop in one process, without a fault."""
    return {
        kind: play(
            Loop(1, steps=STEPS, microbatches=MICROBATCHES, train=train),
            tmp_path_factory.mktemp(kind),
        )
        for kind, train in KINDS.items()
    }


def loop(kind: str, replicas: int, *faults: LoopFault) -> Loop:
    """Replicas of two processes, or of four where stages have several."""
    return Loop(
        replicas,
        4 if kind in WITHIN_STAGES else 2,
        inner=kind,
        steps=STEPS,
        microbatches=MICROBATCHES,
        faults=faults,
        bucket_bytes=SMALL,
        train=KINDS[kind.split(maxsplit=1)[0]],
    )


def assert_undisturbed(trace: Trace, alone: Trace, killed: set[int]) -> None:
    """The job ends with the losses and the model of one process; each sample counts once.

    The mates of the killed end as processes without which the job goes on.
    """
    mates = {rank ^ 1 for rank in killed} - killed
    ends = {rank: code for rank, code in trace.exit_codes.items() if code}
    assert ends == dict.fromkeys(killed, -9) | dict.fromkeys(mates, 75), trace.logs
    assert_same_training(trace, alone)


def assert_same_training(trace: Trace, alone: Trace) -> None:
    assert trace.losses == pytest.approx(alone.losses, rel=1e-5), trace.logs
    for step in range(STEPS):
        first = step * MICROBATCHES
        assert trace.summed[step] == list(range(first, first + MICROBATCHES)), trace.logs
    for model in trace.models.values():
        for key, tensor in model.items():
            torch.testing.assert_close(tensor, alone.models[0][key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_is_killed_at_each_point_of_a_step(
    kind: str, undisturbed: dict[str, Trace], tmp_path: Path
) -> None:
    """One replica after another is lost, each at another point, until one is left."""
    faults = (
        LoopFault(3, 1, at="forward"),
        LoopFault(4, 2, at="backward"),
        LoopFault(7, 3, 2, at="exchange"),
        LoopFault(8, 4, at="optimizer"),
    )
    trace = play(loop(kind, 5, *faults), tmp_path)
    assert_undisturbed(trace, undisturbed[kind], {fault.rank for fault in faults})
    assert trace.alive[STEPS - 1] == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_that_were_summed_before_a_loss_do_not_travel_again(
    kind: str, undisturbed: dict[str, Trace], tmp_path: Path
) -> None:
    """The second replica is lost behind its first bucket, the third in the recovery."""
    faults = (LoopFault(3, 1, 2, at="exchange"), LoopFault(5, 1, at="recovery"))
    trace = play(loop(kind, 4, *faults), tmp_path)
    assert_undisturbed(trace, undisturbed[kind], {3, 5})
    for rank in (1, 7):  # their part of the model is that of the lost process
        sent = list(trace.sent[rank, 1].values())
        assert len(sent) > 1
        assert set(sent[1:]) == {sent[0] - 1}, trace.sent


@pytest.mark.parametrize("kind", WITHIN_STAGES)
def test_a_pipeline_of_four_processes_comes_back(
    kind: str, undisturbed: dict[str, Trace], tmp_path: Path
) -> None:
    """Its processes are new ones, and are all that is left when the first replica is lost."""
    faults = (LoopFault(6, 1, at="backward"), LoopFault(1, 4, at="optimizer"))
    trace = play(replace(loop(kind, 2, *faults), returns=((1, 1),)), tmp_path)
    assert trace.exit_codes == {1: -9, 0: 75, 2: 75, 3: 75, 4: 0, 5: 0, 6: 0, 7: 0}, trace.logs
    assert_same_training(trace, undisturbed["pipeline"])
    assert trace.alive[STEPS - 1] == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_member_alone_has_lost_leaves_no_mate_waiting(
    kind: str, undisturbed: dict[str, Trace], tmp_path: Path
) -> None:
    """One process of a replica learns that a step is committed, or groups are built; its mate not.

    The one goes on to collectives within the replica (clipping, microbatches), the other does too.
    """
    faults = (LoopFault(1, 1, at="unheard vote"), LoopFault(2, 2, at="unheard connection"))
    trace = play(loop(kind, 2, *faults), tmp_path, timeout_s=120)
    assert_undisturbed(trace, undisturbed[kind], set())
    assert trace.alive[STEPS - 1] == [0, 1]


def train_slowly(model: nn.Module, loop: Loop, begin: Callable[..., Replicas], tell: Any) -> None:
    """A loop whose first replica does not leave step 1 before the second one has ended."""
    made: list[Replicas] = []

    def begin_kept(*arguments: Any, **options: Any) -> Replicas:
        made.append(begin(*arguments, **options))
        return made[0]

    def tell_late(step: Step, index: int | None) -> None:
        tell(step, index)
        if step.number == 1 and int(os.environ["RANK"]) < loop.members:
            await_ends(made[0], set(range(loop.members, 2 * loop.members)))

    train(model, loop, begin_kept, tell_late)


def await_ends(replicas: Replicas, ranks: set[int]) -> None:
    """Wait until the launcher has announced the ends of all `ranks`."""
    store, deadline = replicas._rendezvous.stores.store, time.monotonic() + 120
    while not ranks <= ProcessHistory(store.get(keys.PROCESS_HISTORY)).dead:
        assert time.monotonic() < deadline, "they have not ended"
        time.sleep(0.02)


def test_a_mate_ends_as_such_before_the_other_replicas_have_heard_of_the_loss(
    undisturbed: dict[str, Trace], tmp_path: Path
) -> None:
    """They are in the middle of a long step."""
    fault = LoopFault(3, 1, at="backward")
    trace = play(replace(loop("fsdp2", 2, fault), train=train_slowly), tmp_path)
    assert_undisturbed(trace, undisturbed["fsdp2"], {fault.rank})
    assert "replica 1 has lost rank 3" in trace.logs
