"""Schedules of Megatron-Core, observed through the timers of their configuration.

Megatron-Core names the CUDA device where it makes tensors; here, as in the example, functions of
torch stand in for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from resihp.contracts import Op, TelemetryBatch

from .conftest import InProcessSidecar, Run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

MICROBATCHES = 3


@pytest.mark.parametrize(
    ("options", "ranks", "records"),
    [
        (("--tensor", "2"), 4, 250),  # of 50 steps of two microbatches
        (("--pipeline", "2"), 4, 250),
        (("--pipeline", "2", "--chunks", "2"), 4, 450),
    ],
    ids=["tensor parallel", "1F1B", "interleaved"],
)
def test_a_slow_rank_is_named(run: Run, options: tuple[str, ...], ranks: int, records: int) -> None:
    training = run("megatron_core.py", "--slow-rank", "2", *options, ranks=ranks)
    training.assert_named(2)
    assert training.output.count("ResiHP: rank 2 fail_slow") == 1
    assert f"({ranks} ranks; rank {ranks - 1}: {records} records sent, 0 lost)" in training.output
    assert "'resihp/verdict': 'rank 2 fail_slow" in training.output


class RecordingTimers:
    """Timers of a user, with all calls to them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        def call(what: str, barrier: bool = False) -> None:
            self.calls.append((name, what))

        return SimpleNamespace(
            start=lambda **options: call("start", **options),
            stop=lambda **options: call("stop", **options),
        )

    def log(self, names: list[str]) -> str:
        return ", ".join(names)


class Optimizer:
    """An optimizer as Megatron's, which may skip an update and has none of torch's hooks."""

    def __init__(self) -> None:
        self.updates = 0

    def step(self) -> tuple[bool, None, None]:
        self.updates += 1
        return self.updates % 2 == 0, None, None


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron-Core with one rank in this process."""
    import torch
    from megatron.core import parallel_state

    zeros = torch.zeros

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return zeros(*args, device="cpu" if device == "cuda" else device, **kwargs)

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr("torch.zeros", on_cpu)
    parallel_state.initialize_model_parallel()
    yield parallel_state
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def model() -> Any:
    """A model with a configuration of Megatron-Core, whose timers are the user's."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer import TransformerConfig

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = TransformerConfig(
                num_layers=1, hidden_size=4, num_attention_heads=1, timers=RecordingTimers()
            )
            self.model_type = ModelType.encoder_or_decoder
            self.layer = torch.nn.Linear(4, 4)

        def set_input_tensor(self, tensors: Any) -> None:
            assert tensors == [None]

        def forward(
            self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None,
            packed_seq_params: Any = None,
        ) -> Any:  # fmt: skip
            assert self.layer.training
            return self.layer(input_ids[..., None].expand(-1, -1, 4).float())

    return Model()


@pytest.fixture
def schedule(megatron: Any, model: Any) -> Callable[..., None]:
    """Function that runs a schedule over microbatches of two sequences."""
    import torch
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(data: Any, model: Any) -> Any:
        return model(torch.ones(2, 5, dtype=torch.long), **next(data)), lambda y: (y.mean(), {})

    def run(forward_only: bool = False, **arguments: Any) -> None:
        data = iter([arguments] * MICROBATCHES)
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model,
            num_microbatches=MICROBATCHES, seq_length=5, micro_batch_size=2,
            forward_only=forward_only,
        )  # fmt: skip

    return run


def passes(steps: int, *, updates: bool = True) -> list[tuple[int, int, Op]]:
    """Records of so many steps."""
    return [
        record
        for step in range(steps)
        for record in (
            *((step, index, op) for index in range(3) for op in (Op.FORWARD, Op.BACKWARD)),
            *([(step, -1, Op.OPTIMIZER)] if updates else ()),
        )
    ]


def test_each_step_is_recorded_even_if_its_update_is_skipped(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.megatron import observe

    optimizer = Optimizer()
    with observe(model, optimizer, client=sidecar, job="own", heartbeat_s=0.0) as training:
        for _ in range(4):
            schedule()
            optimizer.step()
    assert sidecar.passes() == passes(4)
    assert [(job.name, job.microbatches) for job in sidecar.jobs] == [("own", MICROBATCHES)]
    assert training.monitor is not None
    assert training.monitor.stats.failures == 0
    assert optimizer.updates == 4
    assert "step" not in vars(optimizer)


def test_the_schedule_begins_a_step_where_no_optimizer_is_given(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.megatron import observe

    with observe(model, client=sidecar, heartbeat_s=0.0):
        for _ in range(3):
            schedule()
    assert sidecar.passes() == passes(3, updates=False)


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_an_evaluation_that_replaces_the_timers_is_not_recorded(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar, has_optimizer: bool
) -> None:
    import torch

    from resihp.integrations.megatron import observe

    own, optimizer = model.config.timers, Optimizer()
    given = (model, optimizer) if has_optimizer else (model,)
    with observe(*given, client=sidecar, heartbeat_s=0.0):
        for _ in range(3):
            schedule()
            optimizer.step()
            model.config.timers = None  # as Megatron-LM
            with torch.no_grad():
                schedule(forward_only=True)
            model.config.timers = own
            with torch.no_grad():
                schedule(forward_only=True)
    assert sidecar.passes() == passes(3, updates=has_optimizer)
    assert model.config.timers is own


def test_the_timers_of_the_user_get_the_same_calls(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.megatron import observe

    own = model.config.timers
    schedule()
    alone, own.calls = own.calls, []
    assert ("backward-compute", "stop") in alone
    with observe(model, client=sidecar, heartbeat_s=0.0):
        assert model.config.timers.log(["a", "b"]) == "a, b"
        schedule()
        assert own.calls == alone
    assert model.config.timers is own


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_q_padded"])
def test_packed_sequences_tell_the_work_in_a_microbatch(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar, name: str
) -> None:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from resihp.integrations.megatron import observe

    ends = torch.tensor([0, 6, 8, 9], dtype=torch.int32)
    with observe(model, client=sidecar, heartbeat_s=0.0):
        schedule(packed_seq_params=PackedSeqParams("thd", **{name: ends}))
    assert work(sidecar) == {(9, 3, 6)}


def test_other_arguments_tell_it_too_but_for_the_mask(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar
) -> None:
    import torch

    from resihp.integrations.megatron import observe

    restarting = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    hidden = torch.ones(5, 5).triu(1).bool()[None, None]
    with observe(model, client=sidecar, heartbeat_s=0.0):
        schedule(attention_mask=hidden)
        schedule(attention_mask=hidden, position_ids=restarting)
    assert work(sidecar) == {(10, 2, 5), (10, 3, 5)}


def work(sidecar: InProcessSidecar) -> set[tuple[int, int, int]]:
    """Tokens, sequences and longest sequence of the passes."""
    found = TelemetryBatch.concat(sidecar.batches)
    rows = found.op <= Op.BACKWARD
    columns = (found.tokens, found.sequences, found.max_len)
    return set(zip(*(column[rows].tolist() for column in columns), strict=True))


def test_passes_of_interleaved_chunks_are_told_apart(sidecar: InProcessSidecar) -> None:
    """As the interleaved schedule of rank 0 of 2 runs two microbatches in two chunks."""
    import torch

    from resihp.integrations.megatron import observe

    config = SimpleNamespace(timers=None)
    chunks = [torch.nn.Linear(2, 2) for _ in range(2)]
    outputs: dict[tuple[int, int], Any] = {}
    for chunk in chunks:
        chunk.config = config  # type: ignore[assignment]

    def forward(chunk: int, index: int) -> None:
        config.timers("forward-recv", log_level=2).start()
        config.timers("forward-recv").stop()
        config.timers("forward-compute", log_level=2).start()
        outputs[chunk, index] = chunks[chunk](torch.randn(1, 2)).sum()
        config.timers("forward-compute").stop()

    def backward(chunk: int, index: int) -> None:
        config.timers("backward-compute", log_level=2).start()
        outputs.pop((chunk, index)).backward()
        config.timers("backward-compute").stop()

    order = [(0, 0), (0, 1), (1, 0), (1, 1)]
    with observe(chunks, client=sidecar, heartbeat_s=0.0):
        for _ in range(2):
            config.timers("forward-backward", log_level=1).start(barrier=True)
            for chunk, index in order:
                forward(chunk, index)
            for chunk, index in reversed(order):
                backward(chunk, index)
            config.timers("forward-backward").stop()
    assert config.timers is None
    found = TelemetryBatch.concat(sidecar.batches)
    columns = (found.step, found.op, found.chunk, found.microbatch)
    records = list(zip(*(column.tolist() for column in columns), strict=True))
    assert records == [
        (step, op, chunk, index)
        for step in range(2)
        for op, passes_of in ((Op.FORWARD, order), (Op.BACKWARD, order[::-1]))
        for chunk, index in passes_of
    ]


def test_copies_of_a_model_are_not_observed(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar
) -> None:
    import copy

    import torch

    from resihp.integrations.megatron import observe

    own = model.config.timers
    with observe(model, client=sidecar, heartbeat_s=0.0) as training:
        schedule()
        twin = copy.deepcopy(copy.deepcopy(model))
        assert type(twin.config.timers) is type(own)
        assert twin.config.timers.calls == own.calls
        twin(torch.ones(2, 5, dtype=torch.long)).sum().backward()
        schedule()
    assert sidecar.passes() == passes(2, updates=False)
    assert training.monitor is not None
    assert training.monitor.stats.failures == 0


def test_a_transfer_that_raised_hides_no_later_pass(
    schedule: Callable[..., None], model: Any, sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.megatron import observe

    with observe(model, client=sidecar, heartbeat_s=0.0):
        schedule()
        model.config.timers("forward-recv", log_level=2).start()  # and never stopped
        schedule()
    assert sidecar.passes() == passes(2, updates=False)


def test_a_model_of_something_else_is_logged_and_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    import torch

    from resihp.integrations.megatron import observe

    with observe(torch.nn.Linear(2, 2)) as training:
        assert training.metrics() == {}
    assert "has no configuration of Megatron" in caplog.text
