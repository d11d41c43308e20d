"""The peak of a step's memory is the predicted one, with and without recomputation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.profiler import profile

from resihp.contracts import (
    ContractError,
    InfeasibleError,
    Job,
    Layout,
    Memory,
    ModelShape,
    Plan,
    Schedule,
)
from resihp.elastic import Gpt2, Llama, Mixture, Optimizer, Packed, Setup, measure_memory
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step import Engine, gradient_allreduce
from resihp.elastic.step.memory import LiveTensors
from resihp.elastic.step.setup import Recompute
from resihp.elastic.step.shard import initial_shard
from resihp.layout import shards
from scheduler import make_plan, simulate
from tests.elastic.operators import NoteOperators
from tests.elastic.threads import on_ranks

TOKENS, SHORT, QUOTA = 256, 32, 3
SHAPE = ModelShape(layers=4, hidden=96, heads=8, kv_heads=4, ffn=256, vocab=500)
PLAIN = replace(SHAPE, kv_heads=8, gated=False, tied_embeddings=True)
MODELS = {
    "llama": Llama(SHAPE),
    "tied": Llama(replace(SHAPE, tied_embeddings=True)),
    "gpt2": Gpt2(PLAIN, context=TOKENS, dropout=0.1),
    "mixture": Mixture(SHAPE, experts=4, top_k=2),
}
LAYOUTS = {
    "alone": Layout.grid(dp=1, pp=1, tp=1, layers=4, units=4),
    "tp": Layout.grid(dp=1, pp=2, tp=2, layers=4, units=4),
    "dp": Layout.grid(dp=2, pp=2, tp=1, layers=4, units=4),
}
ADAMW = Optimizer(torch.optim.AdamW, lr=1e-3)
MODES: tuple[Recompute | None, ...] = (None, "attention", "layers")


def batch(step: int, index: int) -> Packed:
    """A short one in the first step, which is there to make all state."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    tokens = TOKENS if step else SHORT
    ids = torch.randint(SHAPE.vocab, (tokens + 1,), generator=chosen)
    return Packed(ids[:-1], ids[1:], (tokens // 2, tokens // 2))


def short_batch(step: int, index: int) -> Packed:
    packed = batch(step, index)
    return Packed(packed.tokens[:SHORT], packed.targets[:SHORT], (SHORT,))


def setup_of(model: str, recompute: Recompute | None = None) -> Setup:
    return Setup(MODELS[model], ADAMW, batch, recompute=recompute)


@cache
def memory_of(setup: Setup) -> Memory:
    """What training takes; measured once for all layouts and schedules."""
    return measure_memory(setup, setup.data(1, 0))


def job_of(
    setup: Setup,
    layout: Layout,
    budget_bytes: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Job:
    assert isinstance(setup.model, Llama | Gpt2)
    shape = setup.model.shape
    return Job(
        name="memory",
        layout=layout,
        microbatches=QUOTA * layout.dp,
        model=shape,
        tokens_per_microbatch=TOKENS,
        schedule=schedule,
        recompute=setup.recompute == "layers",
        memory=replace(memory_of(setup), budget_bytes=budget_bytes),
    )


def measured(
    setup: Setup, layout: Layout, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> dict[int, int]:
    """Peak bytes of each rank's tensors in the second step, in which all state exists."""
    plan = Plan(version=0, layout=layout, quotas=(QUOTA,) * layout.dp, schedule=schedule)

    def run_rank(factory: ProcessGroupFactory) -> int:
        copies, parameters = setup.state_copies, setup.model.parameters
        groups = build_layout_groups(factory, layout, parameters, name="generation", copies=copies)
        with LiveTensors() as tensors:
            shard = initial_shard(setup.model, setup.optimizer, groups)
            engine = Engine(setup, groups, shard, plan, factory.waited)
            for step in range(2):
                tensors.reset_peak()
                engine.accumulate(step)
                engine.update(engine.reduce(step, 0).norm, step)
                engine.gather()
            return tensors.peak_bytes

    return on_ranks(layout.ranks, run_rank)


CASES = [
    ("llama", "alone"), ("llama", "tp"), ("llama", "dp"), ("tied", "alone"), ("gpt2", "dp"),
    ("mixture", "tp"),
]  # fmt: skip
SPLIT_CASES = [
    ("llama", "alone"), ("llama", "tp"), ("llama", "dp"), ("gpt2", "tp"), ("mixture", "tp"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), CASES)
def test_the_predicted_peak_is_within_five_percent(model: str, name: str) -> None:
    layout = LAYOUTS[name]
    peaks = []
    for recompute in MODES:
        setup = setup_of(model, recompute)
        job = job_of(setup, layout)
        predicted = simulate(job, layout, job.quotas).peak_bytes
        found = measured(setup, layout)
        assert predicted == pytest.approx(found, rel=0.05), f"recompute {recompute}"
        peaks.append(max(found.values()))
    assert peaks[0] > peaks[1] > peaks[2], "what is recomputed is not kept"


@pytest.mark.parametrize("copies", [1, 2])
def test_it_is_so_with_sharded_optimizer_state(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_BLOCK_NUMEL", 256)
    layout = Layout.grid(dp=4, pp=1, tp=1, layers=4, units=4)
    whole = setup_of("llama")
    peaks = []
    for setup in (replace(whole, optimizer_replicas=copies, bucket_bytes=1 << 18), whole):
        job = job_of(setup, layout)
        found = measured(setup, layout)
        assert simulate(job, layout, job.quotas).peak_bytes == pytest.approx(found, rel=0.05)
        peaks.append(max(found.values()))
    state = 4 * 2 * sum(p.size * p.row_numel for p in whole.model.parameters.all)
    assert peaks[1] - peaks[0] == pytest.approx(state * (1 - copies / 4), rel=0.1)


@pytest.mark.parametrize(
    ("model", "name"), [("llama", "alone"), ("llama", "dp"), ("mixture", "tp")]
)
def test_it_is_so_where_the_optimizer_copies_all_parameters_at_once(model: str, name: str) -> None:
    """As by default on accelerators."""
    layout, peaks = LAYOUTS[name], []
    for foreach in (False, True):
        adamw = Optimizer(torch.optim.AdamW, lr=1e-3, foreach=foreach)
        setup = replace(setup_of(model, "layers"), optimizer=adamw, data=short_batch)
        job = job_of(setup, layout)
        found = measured(setup, layout)
        assert simulate(job, layout, job.quotas).peak_bytes == pytest.approx(found, rel=0.05)
        peaks.append(max(found.values()))
    assert peaks[1] > peaks[0] or layout.dp > 1, "sums over replicas take as much before"


@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_it_is_so_in_16_bits(model: str) -> None:
    setup = replace(setup_of(model), compute_dtype=torch.bfloat16)
    layout = LAYOUTS["alone"]
    job = job_of(setup, layout)
    predicted = simulate(job, layout, job.quotas).peak_bytes
    assert predicted == pytest.approx(measured(setup, layout), rel=0.05)


@pytest.mark.parametrize(("recompute", "is_shared"), [(None, True), ("layers", False)])
def test_microbatches_share_one_copy_of_the_weights_in_16_bits(
    recompute: Recompute | None, is_shared: bool
) -> None:
    """Unless layers are recomputed: then none is kept between passes."""
    setup = replace(setup_of("llama", recompute), compute_dtype=torch.bfloat16)
    layout = LAYOUTS["alone"]
    plan = Plan(version=0, layout=layout, quotas=(QUOTA,))
    casts: Counter[int] = Counter()

    def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            casts[args[0].data_ptr()] += 1

    def run_rank(factory: ProcessGroupFactory) -> list[int]:
        groups = build_layout_groups(factory, layout, setup.model.parameters, name="generation")
        shard = initial_shard(setup.model, setup.optimizer, groups)
        with NoteOperators(note):
            Engine(setup, groups, shard, plan, factory.waited).accumulate(0)
        return [casts[param.data_ptr()] for param in shard.tensors.values()]

    (found,) = on_ranks(layout.ranks, run_rank).values()
    assert max(found) == (1 if is_shared else 2 * QUOTA)


@pytest.mark.parametrize(("model", "name"), SPLIT_CASES)
def test_it_is_so_with_a_split_backward_pass(model: str, name: str) -> None:
    """Between its halves a microbatch keeps more than before, recomputed or not."""
    layout, split = LAYOUTS[name], Schedule.ZERO_BUBBLE
    for recompute in MODES:
        setup = setup_of(model, recompute)
        job = job_of(setup, layout, schedule=split)
        predicted = simulate(job, layout, job.quotas).peak_bytes
        found = measured(setup, layout, split)
        assert predicted == pytest.approx(found, rel=0.05), f"recompute {recompute}"


def test_a_split_backward_pass_that_does_not_fit_is_refused() -> None:
    layout, setup = LAYOUTS["dp"], setup_of("llama", "layers")
    whole, split = (
        max(simulate(job, layout, job.quotas).peak_bytes.values())
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)
        for job in [job_of(setup, layout, schedule=schedule)]
    )
    assert split > 1.2 * whole
    speeds = dict.fromkeys(layout.ranks, 1.0)
    budget = int(whole * 1.1)
    make_plan(job_of(setup, layout, budget), speeds)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(job_of(setup, layout, budget, Schedule.ZERO_BUBBLE), speeds)
    assert caught.value.constraint == "memory"


def test_recomputation_lets_a_job_fit() -> None:
    layout = LAYOUTS["dp"]
    least = {
        mode: max(simulate(job, layout, job.quotas).peak_bytes.values())
        for mode in MODES
        for job in [job_of(setup_of("llama", mode), layout)]
    }
    budget = int(least["layers"] * 1.1)
    assert budget < least["attention"] < least[None]
    speeds = dict.fromkeys(layout.ranks, 1.0)
    make_plan(job_of(setup_of("llama", "layers"), layout, budget), speeds)
    for mode in (None, "attention"):
        with pytest.raises(InfeasibleError) as caught:
            make_plan(job_of(setup_of("llama", mode), layout, budget), speeds)
        assert caught.value.constraint == "memory"


def test_live_tensors_count_shared_memory_once_and_forget_what_is_gone() -> None:
    outside = torch.zeros(1000)
    with LiveTensors() as tensors:
        first = torch.ones(256)
        view = first.view(16, 16)
        second = first + 1.0
        assert tensors.live_bytes == tensors.peak_bytes == 2048
        del first
        assert tensors.live_bytes == 2048, "the view keeps it"
        del view, second
        assert (tensors.live_bytes, tensors.peak_bytes) == (0, 2048)
        tensors.reset_peak()
        assert tensors.peak_bytes == 0
    assert len(outside) == 1000


def test_an_unknown_kind_of_recomputation_is_refused() -> None:
    with pytest.raises(ContractError, match="recompute: must be 'layers' or 'attention' or None"):
        setup_of("llama", "everything")  # type: ignore[arg-type]


def test_the_norm_of_a_gradient_needs_no_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_allreduce, "_NORM_PART", 1000)
    gradient = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    with profile(profile_memory=True) as profiled:
        found = gradient_allreduce._squared_norm(gradient)
    torch.testing.assert_close(found, gradient.double().square().sum())
    most = max(event.cpu_memory_usage for event in profiled.events())
    assert most < gradient.nbytes
