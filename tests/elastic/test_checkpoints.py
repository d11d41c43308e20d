"""State that nobody alive holds comes back from the newest checkpoint, in the same processes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from resihp.checkpoint import Every, EveryStep
from resihp.contracts import ContractError, Layout, Plan, Replica, Stage
from resihp.elastic.checkpointing import Checkpoints
from resihp.elastic.checkpointing.manager import CheckpointManager
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer, no_decay_on_vectors
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import IteratorData, Setup
from resihp.elastic.step.shard import Shard, initial_shard
from tests.elastic.checkpoint_helpers import level_at
from tests.elastic.engine_job import ALONE, MICROBATCHES, SHAPE, Case, Fault, Outcome, plan, run
from tests.elastic.test_engine_data import Shuffled
from tests.elastic.test_models import LAYOUTS, MODELS, batch
from tests.elastic.threads import Run, gathered, on_ranks, train

STEPS, LOST_AT = 8, 4
PAIR = Layout((Replica((Stage((0,), (0, 2), (4,)), Stage((1,), (2, 4), (4,)))),))
TWICE = Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)
STAGE_LOST = (Fault(1, Phase.ACCUMULATING, LOST_AT),)
LOST = Case(PAIR, STEPS, faults=STAGE_LOST, rescues=(plan(9, ALONE),))
"""The second stage is lost, and the first one goes on alone."""


def with_second(rank: int) -> Layout:
    """As `PAIR`, with another rank in the place of the second stage's."""
    first, second = PAIR.replicas[0].stages
    return Layout((Replica((first, replace(second, ranks=(rank,)))),))


SPARED = replace(
    LOST, ranks=(0, 1, 2, 3), rescues=(plan(9, with_second(2)), plan(10, with_second(3)))
)
"""Two spares, one after the other, take the lost place."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed run."""
    return run(Case(ALONE, STEPS), tmp_path_factory.mktemp("alone"))


def assert_went_on(outcome: Outcome, alone: Outcome, *, dead: set[int], back_at: list[int]) -> None:
    """All steps were made, alike; each rewind began at the step given."""
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == dead, outcome.logs
    assert sorted({s["at"] for s in outcome.switches if s["rewound"]}) == back_at, outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS))
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=2e-5), outcome.logs


def test_the_survivor_alone_goes_on_from_the_checkpoint(alone: Outcome, tmp_path: Path) -> None:
    outcome = run(replace(LOST, checkpoints=tmp_path / "saved"), tmp_path)
    assert_went_on(outcome, alone, dead={1}, back_at=[LOST_AT])
    assert "no surviving rank holds" in outcome.logs


def test_a_joiner_takes_the_place_of_the_lost_stage(alone: Outcome, tmp_path: Path) -> None:
    """The survivor goes back alone, and then takes the joiner in without another rewind."""
    case = replace(
        LOST,
        joiners=(5,),
        welcome=(plan(10, with_second(5), from_step=LOST_AT + 1),),
        checkpoints=tmp_path / "saved",
    )
    outcome = run(case, tmp_path)
    assert_went_on(outcome, alone, dead={1}, back_at=[LOST_AT])
    assert 5 in outcome.shards


def test_a_torn_checkpoint_gives_way_to_the_one_before(alone: Outcome, tmp_path: Path) -> None:
    case = replace(LOST, checkpoints=tmp_path / "saved", torn_at=LOST_AT - 1)
    outcome = run(case, tmp_path)
    assert_went_on(outcome, alone, dead={1}, back_at=[LOST_AT - 1])
    assert f"step {LOST_AT - 1} on" in outcome.logs
    assert "is unusable" in outcome.logs


@pytest.mark.parametrize("phase", [Phase.STREAMING, Phase.VOTING])
def test_a_further_loss_on_the_way_back(phase: Phase, alone: Outcome, tmp_path: Path) -> None:
    """Survivors that have gone back and such as have not yet agree on where they are."""
    faults = (*STAGE_LOST, Fault(2, phase, LOST_AT))
    case = replace(SPARED, faults=faults, checkpoints=tmp_path / "saved")
    assert_went_on(run(case, tmp_path), alone, dead={1, 2}, back_at=[LOST_AT])


def test_memory_alone_brings_a_lost_stage_back(alone: Outcome, tmp_path: Path) -> None:
    outcome = run(replace(LOST, in_memory=2), tmp_path)
    assert_went_on(outcome, alone, dead={1}, back_at=[LOST_AT])
    assert f"went back to step {LOST_AT - 1}, read from peer memory" in outcome.logs


def test_a_spare_reads_from_the_memory_of_others(alone: Outcome, tmp_path: Path) -> None:
    """Twice: what is kept of the layout before does for a loss right after the change."""
    faults = (*STAGE_LOST, Fault(2, Phase.ACCUMULATING, LOST_AT))
    outcome = run(replace(SPARED, faults=faults, in_memory=2), tmp_path)
    assert_went_on(outcome, alone, dead={1, 2}, back_at=[LOST_AT])
    assert outcome.logs.count("read from peer memory") >= 3


def test_memory_is_nearer_than_a_disk_whose_newest_is_torn(alone: Outcome, tmp_path: Path) -> None:
    case = replace(LOST, checkpoints=tmp_path / "saved", torn_at=LOST_AT - 1, in_memory=2)
    outcome = run(case, tmp_path)
    assert_went_on(outcome, alone, dead={1}, back_at=[LOST_AT])


def test_a_rank_lost_with_its_peer_comes_back_from_disk(alone: Outcome, tmp_path: Path) -> None:
    stages = tuple(Stage((rank,), (rank, rank + 1), (4,)) for rank in range(2))
    three = Layout((Replica((*stages, Stage((2,), (2, 4), (4,)))),))
    faults = (*STAGE_LOST, Fault(1, Phase.ACCUMULATING, LOST_AT, victim="2"))
    saved = tmp_path / "saved"
    case = replace(LOST, layout=three, faults=faults[::-1], checkpoints=saved, in_memory=2)
    outcome = run(case, tmp_path)
    assert_went_on(outcome, alone, dead={1, 2}, back_at=[LOST_AT])
    assert f"read from {saved}" in outcome.logs
    assert "read from peer memory" not in outcome.logs


def test_shared_storage_brings_a_lost_stage_back(alone: Outcome, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    outcome = run(replace(LOST, checkpoints=url), tmp_path)
    assert_went_on(outcome, alone, dead={1}, back_at=[LOST_AT])
    assert f"went back to step {LOST_AT - 1}, read from {url}" in outcome.logs


def test_without_checkpoints_the_job_stops_and_names_what_is_lost(tmp_path: Path) -> None:
    outcome = run(LOST, tmp_path)
    assert all(code != 0 for code in outcome.exit_codes.values()), outcome.logs
    assert "no surviving rank holds last.norm" in outcome.logs
    assert "the job keeps no checkpoints" in outcome.logs


def test_a_loss_before_the_first_checkpoint_is_a_clear_stop(tmp_path: Path) -> None:
    faults = (Fault(1, Phase.ACCUMULATING, 0),)
    outcome = run(replace(LOST, faults=faults, checkpoints=tmp_path / "saved"), tmp_path)
    assert all(code != 0 for code in outcome.exit_codes.values()), outcome.logs
    assert "no usable checkpoint" in outcome.logs


def test_a_job_that_starts_again_goes_on_in_another_layout(alone: Outcome, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    first = run(Case(PAIR, 3, checkpoints=saved), tmp_path / "first")
    second = run(Case(TWICE, STEPS, checkpoints=saved), tmp_path / "second")
    assert (min(second.losses), max(second.losses)) == (3, STEPS - 1), second.logs
    for step, loss in (first.losses | second.losses).items():
        assert loss == pytest.approx(alone.losses[step], abs=2e-5), second.logs


def bf16_setup() -> Setup:
    """Operators in bf16, groups, scalars beside the count of steps, data with a cursor."""
    optimizer = Optimizer(torch.optim.NAdam, lr=5e-3, options=no_decay_on_vectors)
    data = IteratorData(Shuffled(), MICROBATCHES)
    model = Llama(replace(SHAPE, tied_embeddings=True))
    return Setup(model, optimizer, data, compute_dtype=torch.bfloat16)


def test_what_comes_back_is_equal_to_the_last_bit(tmp_path: Path) -> None:
    """A spare takes the lost place: the same layout, so that the same bits are to be expected."""
    undisturbed = run(Case(PAIR, STEPS, setup=bf16_setup), tmp_path / "undisturbed")
    case = Case(
        PAIR,
        STEPS,
        faults=STAGE_LOST,
        ranks=(0, 1, 2),
        rescues=(plan(9, with_second(2)),),
        checkpoints=tmp_path / "saved",
        setup=bf16_setup,
    )
    outcome = run(case, tmp_path / "disturbed")
    assert outcome.losses == undisturbed.losses, outcome.logs
    expected = undisturbed.full_state()
    for key, tensors in outcome.full_state().items():
        assert all(map(torch.equal, tensors, expected[key])), key


@cache
def _trained(optimizer: Optimizer) -> Run:
    """What training in the first layout gives; made once for all places."""
    plan = Plan(version=0, layout=LAYOUTS["uneven"], quotas=(3, 2))
    return train(Setup(MODELS["tied"], optimizer, batch), plan, STEPS)


@pytest.mark.parametrize("scheme", ["", "file", "memory"])
@pytest.mark.parametrize(
    "optimizer",
    [Optimizer(torch.optim.SGD, lr=1e-2), Optimizer(torch.optim.RAdam, lr=1e-3)],
    ids=["nothing kept", "moments and scalars"],
)
def test_pieces_of_one_layout_fill_any_other(
    optimizer: Optimizer, scheme: str, tmp_path: Path
) -> None:
    where = level_at(f"{scheme}://{tmp_path}" if scheme else tmp_path)
    setup = Setup(MODELS["tied"], optimizer, batch)
    before, after = LAYOUTS["uneven"], LAYOUTS["grid"]
    checkpoints = Checkpoints(lambda: [where], EveryStep(), host_cache_bytes=1 << 25)
    store = HashStore()

    def keeper(rank: int) -> CheckpointManager:
        rendezvous = Rendezvous(lambda: store, rank, before.ranks, Timeouts())
        return CheckpointManager(checkpoints, setup, rendezvous)

    trained = _trained(optimizer)
    for rank, shard in trained.shards.items():
        saving = keeper(rank)
        saving.prepare(Plan(version=0, layout=before, quotas=(3, 2)), 0, shard)
        saving.save(STEPS - 1, shard)
        saving.close(is_done=True)

    def restored(factory: ProcessGroupFactory) -> Shard:
        groups = build_layout_groups(factory, after, setup.model.parameters, name="after")
        shard = initial_shard(setup.model, setup.optimizer, groups)
        assert keeper(factory.rank).resume(groups.everyone, shard) == STEPS
        return shard

    shards = on_ranks(after.ranks, restored)
    expected = trained.state
    for param, tensors in gathered(shards).items():
        assert all(map(torch.equal, tensors, expected[param])), param.key
    for shard in shards.values():
        assert torch.equal(shard.scalars(), trained.shards[0].scalars())


def resumed(before: Setup, after: Setup, folder: Path) -> int:
    """Steps with which a job on one rank goes on from the checkpoint of another job."""
    checkpoints = Checkpoints(lambda: [level_at(folder)], EveryStep())

    def run_rank(factory: ProcessGroupFactory) -> int:
        completed = 0
        for name, setup in (("before", before), ("after", after)):
            groups = build_layout_groups(factory, ALONE, setup.model.parameters, name=name)
            shard = initial_shard(setup.model, setup.optimizer, groups)
            rendezvous = Rendezvous(HashStore, 0, (0,), Timeouts())
            manager = CheckpointManager(checkpoints, setup, rendezvous)
            completed = manager.resume(groups.everyone, shard)
            manager.prepare(Plan(version=0, layout=ALONE, quotas=(1,)), 0, shard)
            manager.save(completed, shard)
            manager.close(is_done=True)
        return completed

    return on_ranks((0,), run_rank)[0]


TIED = Setup(MODELS["tied"], Optimizer(torch.optim.AdamW), batch)
WITH_CURSOR = replace(TIED, data=IteratorData(Shuffled(), MICROBATCHES))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            replace(TIED, model=Llama(MODELS["tied"].shape, qkv_bias=True)),
            TIED,
            "model: the checkpoint holds a model with 50 parameters",
        ),
        (
            TIED,
            replace(TIED, optimizer=Optimizer(torch.optim.SGD)),
            r"moments: the checkpoint holds \['exp_avg', 'exp_avg_sq'\], this job has \[\]",
        ),
        (TIED, WITH_CURSOR, "data: the checkpoint has no cursor"),
        (WITH_CURSOR, TIED, "data: the checkpoint has a cursor"),
    ],
    ids=["model", "optimizer", "no cursor", "cursor"],
)
def test_a_checkpoint_of_another_job_is_refused(
    before: Setup, after: Setup, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match=message):
        resumed(before, after, tmp_path)


def test_checkpoints_without_a_description_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote them."""
    monkeypatch.setattr("resihp.elastic.checkpointing.manager._description", lambda setup: {})
    resumed(TIED, TIED, tmp_path)
    monkeypatch.undo()
    assert resumed(TIED, TIED, tmp_path) == 3


def test_a_save_that_a_change_of_layout_holds_up_is_made_in_the_next_step(tmp_path: Path) -> None:
    """Also where the rank that decides has just come in; and the layout stays in the last step."""
    first, second = PAIR.replicas[0].stages
    before = Layout((Replica((replace(first, ranks=(1,)), replace(second, ranks=(2,)))),))
    case = Case(
        before,
        STEPS,
        (plan(1, PAIR, from_step=LOST_AT + 1), plan(2, before, from_step=STEPS)),
        ranks=(0, 1, 2),
        checkpoints=tmp_path / "saved",
        policy=Every(LOST_AT),
    )
    outcome = run(case, tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert {(s["version"], s["at"]) for s in outcome.switches} == {(1, LOST_AT + 1)}
    saved = level_at(tmp_path / "saved").steps()
    assert sorted(saved) == [0, LOST_AT + 1, STEPS - 1], outcome.logs
