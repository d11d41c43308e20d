"""`resihp.instrument` in one process: passes, steps, work and what it leaves behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributions import Independent, Normal
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import resihp
from resihp.contracts import ContractError, Op
from resihp.hooks._probes import RequestedProbe
from resihp.instrumentation._pass_timer import PassTimer
from resihp.instrumentation._patches import Patches
from resihp.layout.rank_groups import RankDescription
from tests.hooks.conftest import Sidecar, until
from tests.instrumentation.observed import BACKWARD, FORWARD, OPTIMIZER, Model, Observed, one_step


@pytest.mark.parametrize("optimizer", [True, False])
def test_steps_are_passes_and_an_update(observe, optimizer):
    loop = observe(optimizer=optimizer)
    loop.step(microbatches=3)
    loop.step(microbatches=3)
    assert loop.passes() == one_step(0, 3) + one_step(1, 3)
    assert loop.monitor.stats.failures == 0
    records = loop.records()
    assert (records.wait_ms[records.op != BACKWARD] == 0).all()
    assert (records.wait_ms >= 0).all()
    assert records.tokens.tolist()[:2] == [6, 6]
    assert records.sequences.tolist()[:2] == [2, 2]
    (job,) = loop.sidecar.jobs
    assert (job.name, job.microbatches, job.layout.ranks) == ("loop", 3, (0,))


def test_evaluation_is_not_recorded(observe):
    loop = observe()
    loop.step()
    with torch.no_grad():
        loop.model(torch.ones(1, 1, 4))
    with torch.inference_mode():
        loop.model(torch.ones(1, 1, 4))
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)


@pytest.fixture
def alone(tmp_path):
    """Process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("gradients", [torch.no_grad, contextlib.nullcontext])
def test_evaluation_by_a_schedule_is_not_recorded(alone, observe, gradients):
    stage = PipelineStage(Model(), 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, _: y.square().sum())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    loop = observe(schedule, optimizer)
    x = torch.ones(4, 4)
    for _ in range(2):
        schedule.step(x, target=x)
        optimizer.step()
        with gradients():
            schedule.eval(x, target=x)
    assert loop.passes() == one_step(0, 2) + one_step(1, 2)


def fail_in_forward(loop):
    loop.model.broken = True
    with pytest.raises(ValueError, match="broken batch"):
        loop.step()
    loop.model.broken = False


def test_failed_forward_pass_leaves_no_record(observe):
    loop = observe()
    fail_in_forward(loop)
    loop.step()
    assert loop.passes() == one_step(0)


def fail_in_backward(loop):
    def fail(gradient):
        raise ValueError("broken gradient")

    handle = loop.model.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="broken gradient"):
        loop.step()
    handle.remove()


def test_failed_backward_pass_leaves_no_record(observe):
    loop = observe()
    fail_in_backward(loop)
    loop.step()
    loop.step()
    assert loop.passes() == [
        (0, FORWARD, 0),
        (0, FORWARD, 1),
        (0, BACKWARD, 1),
        (0, OPTIMIZER, -1),
        *one_step(1),
    ]


def test_update_after_a_failed_backward_pass_ends_the_step(observe):
    loop = observe()
    fail_in_backward(loop)
    loop.optimizer.step()
    loop.step()
    assert loop.passes() == [(0, FORWARD, 0), (0, OPTIMIZER, -1), *one_step(1)]


@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_backward])
def test_failed_pass_is_under_way_no_longer(observe, fail):
    loop = observe(heartbeat_s=0.01)
    loop.step()
    fail(loop)
    beats = loop.sidecar.heartbeats
    seen = len(beats)
    until(lambda: len(beats) > seen + 1)
    assert beats[-1].position.op is None
    next(iter(DataLoader([torch.ones(1)])))
    loop.step()
    assert loop.records().op.tolist().count(int(Op.DATA)) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_belongs_to_the_backward_pass(observe, reentrant):
    class Recomputing(Model):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    loop = observe(Recomputing())
    x = torch.ones(2, 3, 4, requires_grad=True)
    for _ in range(2):
        loop.model(x).sum().backward()
        loop.optimizer.step()
    assert loop.passes() == one_step(0) + one_step(1)


def test_model_that_is_recomputed_as_a_whole(observe):
    loop = observe()
    x = torch.ones(2, 3, 4, requires_grad=True)
    checkpoint(loop.model, x, use_reentrant=False).sum().backward()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)


class Tree(Model):
    """Calls itself for each half of its input, down to single rows."""

    def forward(self, x):
        if len(x) == 1:
            return super().forward(x)
        left, right = x.chunk(2)
        with contextlib.suppress(RuntimeError):
            self(left[..., 1:])
        return self(left) + self(right)


def test_a_model_that_calls_itself_is_one_pass(observe, hands):
    loop = observe(Tree(), clock=hands.clock)
    loop.model.first.register_forward_hook(lambda *_: hands.pass_ms(1))
    for _ in range(2):
        loop.model(torch.ones(4, 3, 4)).sum().backward()
        loop.optimizer.step()
    assert loop.passes() == one_step(0) + one_step(1)
    assert loop.records().compute_ms[0] == 4


@dataclass
class Output:
    loss: torch.Tensor
    more: list


@pytest.mark.parametrize(
    "form",
    [
        lambda y: (y, y.detach()),
        lambda y: {"logits": y},
        lambda y: OrderedDict(loss=y, logits=y * 2),
        lambda y: Output(y, [y, {"z": y}]),
        lambda y: [{"deep": (y,)}],
    ],
)
def test_outputs_of_any_form(observe, form):
    loop = observe(Model(form))
    output = loop.model(torch.ones(2, 3, 4))
    while not isinstance(output, torch.Tensor):
        if isinstance(output, Output):
            output = output.loss
        output = next(iter(output.values())) if isinstance(output, dict) else output
        output = output[0] if isinstance(output, list | tuple) else output
    output.sum().backward()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        (lambda y: SimpleNamespace(logits=y), lambda output: output.logits.sum()),
        (lambda y: Normal(y, 1.0), lambda output: output.rsample().sum()),
        (
            lambda y: (Independent(Normal(y, 1.0), 1), None),
            lambda output: output[0].rsample().sum(),
        ),
        (lambda y: [y * n for n in range(12)], lambda output: output[11].sum()),
        (lambda y: [[[[[y]]]]], lambda output: output[0][0][0][0][0].sum()),
    ],
)
def test_outputs_that_are_many_or_in_objects(observe, form, loss):
    loop = observe(Model(form))
    loss(loop.model(torch.ones(2, 3, 4))).backward()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)


@dataclass
class Partial:
    logits: torch.Tensor
    loss: torch.Tensor = field(init=False)


class Lazy(dict):
    def values(self):
        raise RuntimeError("not loaded")


@pytest.mark.parametrize(
    ("form", "failures"), [(Partial, 0), (lambda y: SimpleNamespace(lazy=Lazy(), logits=y), 1)]
)
def test_outputs_that_cannot_be_read_in_parts(observe, form, failures):
    loop = observe(Model(form))
    loop.model(torch.ones(2, 3, 4)).logits.sum().backward()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)
    assert loop.monitor.stats.failures == failures


class CountingRows(list):
    """Counts how many of its rows are looked at."""

    seen = 0

    def __iter__(self):
        for row in super().__iter__():
            self.seen += 1
            yield row


def test_an_output_of_many_rows_is_not_searched_to_its_end(observe):
    rows = CountingRows([[1, 2, 3, 4]] * 20_000)
    loop = observe(Model(lambda y: {"rows": rows, "y": y}))
    loop.model(torch.ones(2, 3, 4))["y"].sum().backward()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)
    assert 0 < rows.seen <= 1_000


def test_a_backward_pass_that_cannot_be_seen_is_told_once(observe, caplog):
    loop = observe()
    kept = []
    loop.model.form = kept.append
    for _ in range(2):
        loop.model(torch.ones(2, 3, 4))
        kept.pop().sum().backward()
        loop.optimizer.step()
    assert [op for _, op, _ in loop.passes()] == 2 * [FORWARD, OPTIMIZER]
    assert caplog.text.count("its backward pass is not recorded") == 1


def halve(y):
    y /= 2
    return y


def mask_first(y):
    y[..., 0] = 0
    return y


@pytest.mark.parametrize("change", [halve, mask_first, lambda y: halve(mask_first(y.mT).mT)])
@pytest.mark.parametrize("form", [lambda y: y, lambda y: y.mT[:1], halve])
def test_outputs_that_are_changed_in_place(observe, form, change):
    loop = observe(Model(form))
    change(loop.model(torch.ones(2, 3, 4))).sum().backward()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)


def test_an_output_that_is_a_view_of_a_parameter(observe):
    loop = observe(Model())
    loop.model.form = lambda _: loop.model.first.weight[:2]
    loop.step()
    assert loop.passes() == one_step(0)


def test_a_function_of_the_users_that_returns_its_input_is_part_of_the_pass(observe, hands):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x

        @staticmethod
        def backward(context, gradient):
            hands.pass_ms(20.0)
            return gradient

    loop = observe(Model(Function.apply), clock=hands.clock)
    loop.step()
    records = loop.records()
    assert records.compute_ms[records.op == BACKWARD].tolist() == [20.0]


def test_a_positional_mask_is_work(observe):
    class Masked(Model):
        def forward(self, x, attention_mask):
            return super().forward(x)

    loop = observe(Masked())
    loop.model(torch.ones(2, 3, 4), torch.tensor([[1, 1, 1], [1, 0, 0]])).sum().backward()
    assert loop.records().tokens.tolist() == [4, 4]


def test_calls_that_tell_no_work_are_told_once(observe, caplog):
    class Batched(Model):
        def forward(self, batch):
            return super().forward(batch())

    loop = observe(Batched())
    with loop.monitor.step(), loop.monitor.forward(seq_lens=[3, 3]):
        loop.model(lambda: torch.ones(2, 3, 4))
    assert not caplog.text
    for _ in range(2):
        loop.model(lambda: torch.ones(2, 3, 4)).sum().backward()
        loop.optimizer.step()
    assert caplog.text.count("tell no work") == 1


def test_two_forward_passes_before_one_backward_pass(observe):
    loop = observe()
    first, second = loop.model(torch.ones(2, 3, 4)), loop.model(torch.ones(2, 3, 4))
    (first.sum() + second.sum()).backward()
    loop.optimizer.step()
    passes = loop.passes()
    assert passes[:2] == [(0, FORWARD, 0), (0, FORWARD, 1)]
    assert [op for _, op, _ in passes[2:]] == [BACKWARD, OPTIMIZER]


def test_scaler_that_skips_an_update_ends_the_step(observe):
    loop = observe()
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        scaler.scale(factor * loop.model(torch.ones(2, 3, 4)).sum()).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    assert loop.passes() == [(0, FORWARD, 0), (0, BACKWARD, 0), *one_step(1)]


def test_update_inside_the_backward_pass_ends_the_step_after_it(observe):
    loop = observe()
    weight = loop.model.first.weight
    weight.register_post_accumulate_grad_hook(lambda _: loop.optimizer.step())
    for _ in range(2):
        loop.model(torch.ones(2, 3, 4)).sum().backward()
    assert loop.passes() == one_step(0)[:2] + one_step(1)[:2]


def test_update_that_runs_the_passes_ends_the_step(observe, caplog):
    loop = observe()

    def closure():
        loss = loop.model(torch.ones(2, 3, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        loop.optimizer.step(closure)
    assert loop.passes() == [(step, op, 0) for step in (0, 1) for op in (FORWARD, BACKWARD)]
    assert not caplog.text


def test_other_models_and_optimizers_are_left_alone(observe):
    loop = observe(optimizer=False)
    critic = Model()
    critics_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
    critic(loop.model(torch.ones(2, 3, 4))).sum().backward()
    critics_optimizer.step()
    loop.optimizer.step()
    assert loop.passes() == one_step(0)


def in_another_thread(call):
    failed = []

    def run():
        try:
            call()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return failed


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_passes_of_another_thread_are_left_out(observe, by_hand, broken):
    """Those of an actor, which calls the model with gradients while the loop trains it."""
    x = torch.ones(2, 3, 4)
    loop = observe()

    def act():
        loop.model.broken = broken
        assert len(in_another_thread(lambda: loop.model(x).sum().backward())) == broken
        loop.model.broken = False

    for _ in range(2):
        with loop.monitor.step() if by_hand else contextlib.nullcontext():
            loss = loop.model(x).sum()
            act()
            loss.backward()
            act()
            loop.optimizer.step()
        act()
    assert loop.passes() == one_step(0) + one_step(1)
    assert loop.monitor.stats.failures == 0


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loop_that_goes_on_in_another_thread_is_observed(observe, by_hand):
    loop = observe()

    def train():
        for _ in range(2):
            with loop.monitor.step() if by_hand else contextlib.nullcontext():
                loop.step()

    in_another_thread(train)
    train()
    steps = range(3 + by_hand)
    assert loop.passes() == [each for step in steps for each in one_step(step)]


def test_a_pass_of_another_thread_that_a_step_ends_under_does_not_outlive_it(observe, hands):
    x = torch.ones(2, 3, 4)
    began, go_on = threading.Event(), threading.Event()

    def wait(y):
        if threading.current_thread() is actor:
            began.set()
            assert go_on.wait(30.0)
        return y

    loop = observe(Model(wait))
    actor = threading.Thread(target=lambda: loop.model(x))
    actor.start()
    assert began.wait(30.0)
    loop.step()
    loop.model.form = lambda y: (go_on.set(), actor.join(), y)[2]
    loop.step()
    loop.step()
    assert loop.monitor.current_step == 3
    assert loop.passes()[-6:] == one_step(1) + one_step(2)
    assert loop.monitor.stats.failures == 0


def test_a_model_that_refuses_changes_of_its_attributes(observe, monkeypatch):
    def refuse(model, name, *value):
        raise AttributeError(f"{name} stays as it is")

    model = Model()
    before = dict(vars(model))
    monkeypatch.setattr(Model, "__setattr__", refuse)
    monkeypatch.setattr(Model, "__delattr__", refuse)
    loop = observe(model)
    loop.step()
    loop.monitor.remove()
    assert loop.passes() == one_step(0)
    assert vars(model) == before


def test_several_optimizers_of_one_model(observe):
    loop = observe(optimizer=False)
    halves = [
        torch.optim.SGD(half.parameters(), lr=1e-3)
        for half in (loop.model.first, loop.model.second)
    ]
    for _ in range(2):
        loop.model(torch.ones(2, 3, 4)).sum().backward()
        for half in halves:
            half.step()
    assert loop.passes() == one_step(0) + one_step(1)


def test_steps_by_hand(observe):
    loop = observe()
    for _ in range(2):
        with loop.monitor.step():
            loop.model(torch.ones(2, 3, 4)).sum().backward()
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.sub_(1e-3 * parameter.grad)
    assert loop.passes() == one_step(0)[:2] + one_step(1)[:2]


def test_failed_pass_in_a_step_by_hand_leaves_the_next_step_whole(observe):
    loop = observe()
    for step in range(4):
        loop.model.broken = step == 1
        with contextlib.suppress(ValueError), loop.monitor.step():
            loop.step()
    assert loop.passes() == [*one_step(0), *one_step(2), *one_step(3)]


def test_blocks_of_the_users_are_not_timed_twice(observe):
    loop = observe()
    with loop.monitor.step():
        with loop.monitor.forward(seq_lens=[3, 3]):
            output = loop.model(torch.ones(2, 3, 4))
        with loop.monitor.backward():
            output.sum().backward()
        with loop.monitor.optimizer():
            loop.optimizer.step()
    assert loop.passes() == one_step(0)


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models(observe, in_place):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Model()
    if in_place:
        model.compile(backend="aot_eager", fullgraph=True)
        loop = observe(model)
    else:
        loop = observe(torch.compile(model, backend="aot_eager", fullgraph=True))
    for _ in range(3):
        loop.step()
    assert loop.passes() == one_step(0) + one_step(1) + one_step(2)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_model_that_is_compiled_afterwards_trains_on(observe, in_place, caplog):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loop = observe()
    if in_place:
        loop.model.compile(backend="aot_eager", fullgraph=True)
        compiled = loop.model
    else:
        compiled = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(2, 3, 4)).sum().backward()
        loop.optimizer.step()
    assert not loop.passes()
    assert "give `instrument` what the loop calls" in caplog.text
    assert loop.monitor.stats.failures == 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_compiled_update_compiles_nothing_of_the_observation(observe, recwarn):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loop = observe(interval_s=300.0)
    probes = loop.monitor._probes
    probes.requests.append(RequestedProbe("one", "gemm"))
    loop.optimizer.step = torch.compile(loop.optimizer.step, backend="eager")
    loop.step()
    assert probes.answers.popleft().ms is not None
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not any("Dynamo does not know how to trace" in str(one.message) for one in recwarn)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own
def test_compiled_autograd_sees_nothing_of_the_observation(observe, caplog):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loop = observe()
    loop.step()
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        for _ in range(2):
            loop.step(microbatches=2)
    assert caplog.text.count("compiled autograd") == 1
    loop.step()
    forward_alone = [(FORWARD, 0), (FORWARD, 1), (OPTIMIZER, -1)]
    compiled = [(step, *each) for step in (1, 2) for each in forward_alone]
    assert loop.passes() == one_step(0) + compiled + one_step(3)
    assert loop.monitor.stats.failures == 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_torch_without_a_place_for_compiled_calls(observe, monkeypatch):
    monkeypatch.delattr(torch.nn.Module, "_compiled_call_impl")
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module._call_impl)
    loop = observe()
    loop.step()
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)
    loop.monitor.remove()
    assert "forward" not in vars(loop.model)


def test_remove_leaves_everything_as_it_was(observe):
    wait, scaler_step = torch.distributed.Work.wait, torch.amp.GradScaler.step
    functional = torch.distributed._functional_collectives
    wait_tensor = functional.wait_tensor
    loop = observe()
    assert torch.amp.GradScaler.step is not scaler_step
    loop.step()
    loop.monitor.remove()
    loop.monitor.remove()
    loop.step()
    assert loop.passes() == one_step(0)
    assert "_compiled_call_impl" not in vars(loop.model)
    assert torch.distributed.Work.wait is wait
    assert functional.wait_tensor is wait_tensor
    assert torch.amp.GradScaler.step is scaler_step


@pytest.mark.parametrize("by_hand", [True, False])
def test_backward_pass_after_remove_is_not_recorded(observe, by_hand):
    loop = observe()
    loop.step()
    with loop.monitor.step() if by_hand else contextlib.nullcontext():
        loss = loop.model(torch.ones(2, 3, 4)).sum()
        loop.monitor.remove()
        step = loop.monitor.current_step
        loss.backward()
        loop.optimizer.step()
    with loop.monitor.step(), loop.monitor.forward():
        pass
    assert loop.passes() == [*one_step(0), (1, FORWARD, 0), (step + by_hand, FORWARD, 0)]


@pytest.mark.parametrize("optimizer", [True, False])
def test_model_that_nobody_holds_is_freed_with_its_monitor(optimizer):
    scaler_step, load = torch.amp.GradScaler.step, torch.utils.data.DataLoader.__iter__
    sidecar = Sidecar()

    def train():
        loop = Observed(Synchronized(), optimizer, sidecar=sidecar)
        loop.step()
        loop.model(torch.ones(2, 3, 4)).sum().backward()  # within a step
        return weakref.ref(loop.model), weakref.ref(loop.monitor)

    model, monitor = train()

    def are_freed():
        gc.collect()  # does nothing while another thread collects
        return model() is None and monitor() is None

    until(are_freed, timeout_s=30.0)
    assert torch.amp.GradScaler.step is scaler_step
    assert torch.utils.data.DataLoader.__iter__ is load
    passes = [FORWARD, BACKWARD, OPTIMIZER, FORWARD, BACKWARD]
    until(lambda: len(sidecar.records) >= len(passes))  # the sender's thread outlives them
    assert sidecar.records.op.tolist() == passes


@pytest.fixture
def no_collection(observe):
    """Nothing is freed but what nobody holds, as cycles do, of which a first import makes some."""
    observe(Synchronized()).step()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_removed", [True, False])
def test_model_that_nobody_holds_is_freed_at_once(observe, no_collection, is_removed):
    loop = observe()
    loop.step()
    model = weakref.ref(loop.model)
    if is_removed:
        loop.monitor.remove()
    del loop.model
    assert model() is None


def test_model_with_a_wrapped_method_is_freed_after_remove(observe, no_collection):
    loop = observe(Synchronized())
    loop.step()
    model = weakref.ref(loop.model)
    loop.monitor.remove()
    del loop.model
    assert model() is None


def test_monitor_outlives_its_model(observe):
    loop = observe()
    loop.step()
    del loop.model, loop.optimizer
    gc.collect()
    with loop.monitor.step(), loop.monitor.forward():
        pass
    assert loop.passes() == [*one_step(0), (1, FORWARD, 0)]


class Synchronized(Model):
    """Has buffers synchronized as DDP does."""

    broadcast_buffers = True

    def forward(self, x):
        self._sync_buffers()
        return super().forward(x)

    def _sync_buffers(self):
        pass


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_train_and_are_not_observed(observe, copied):
    loop = observe(Synchronized(abs))
    loop.step()
    twin = copied(copied(loop.model))
    for parameter, of_twin in zip(loop.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, of_twin)
    twin(torch.ones(2, 3, 4)).sum().backward()
    copied(loop.optimizer).step()
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)
    assert loop.monitor.stats.failures == 0
    torch._dynamo.reset()
    torch.compile(twin, backend="aot_eager", fullgraph=True)(torch.ones(2, 3, 4))


@pytest.mark.parametrize("copied", [copy.copy, lambda model: model._replicate_for_data_parallel()])
def test_shallow_copies_of_a_model_run_their_own_weights(observe, copied):
    loop = observe()
    loop.step()
    replica = copied(loop.model)
    replica.first = copy.deepcopy(replica.first)
    torch.nn.init.zeros_(replica.first.weight)
    x = torch.ones(2, 3, 4)
    expected = loop.model.second(torch.relu(loop.model.first.bias.expand(2, 3, 4)))
    assert torch.equal(replica(x), expected)
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)


def test_a_saved_model_needs_no_resihp(observe):
    loop = observe(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    loop.step()
    assert b"resihp" not in pickle.dumps(loop.model)


class Unannotated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:.*TorchScript")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_can_be_scripted(observe, wrapped):
    ignored = list(torch.jit._recursive.ignored_attributes)
    loop = observe(Unannotated())
    loop.step()
    x = torch.ones(2, 3, 4)
    scripted = torch.jit.script(torch.nn.Sequential(loop.model) if wrapped else loop.model)
    assert torch.equal(scripted(x), loop.model(x))
    loop.monitor.remove()
    assert torch.jit._recursive.ignored_attributes == ignored


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_monitors_may_be_removed_in_any_order(observe, order):
    owners = [
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
        (torch.utils.data.DataLoader, "__iter__"),
        (torch.amp.GradScaler, "step"),
        (torch.distributed.Work, "wait"),
        (torch.nn.Module, "_replicate_for_data_parallel"),
    ]
    before = [getattr(*place) for place in owners]
    loops = [observe(), observe()]
    for loop in loops:
        loop.step()
    first, second = (loops[at] for at in order)
    first.monitor.remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(float("inf") * second.model(torch.ones(2, 3, 4)).sum()).backward()
    scaler.step(second.optimizer)
    assert second.monitor.current_step == 2, "the other's patches are still there"
    assert first.monitor.current_step == 1
    second.monitor.remove()
    assert [getattr(*place) for place in owners] == before


def patched_methods():
    """Methods of torch's classes as they are now; a thread restores them when a model has ended."""
    return torch.amp.GradScaler.step, DataLoader.__iter__


def test_a_model_may_end_while_torch_is_patched():
    before = patched_methods()
    loops, patches = [Observed()], Patches()

    def wrapper(original):
        loops.clear()
        gc.collect()
        return original

    patches.wrap(torch.amp.GradScaler, "step", wrapper)
    patches.remove()
    until(lambda: patched_methods() == before)


def test_a_model_may_end_while_an_optimizer_steps(observe):
    others, before = [], patched_methods()

    def end_the_other(*_):
        others.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(end_the_other)
    others.append(Observed())
    loop = observe()
    try:
        loop.step()
    finally:
        handle.remove()
    assert loop.passes() == one_step(0)
    loop.monitor.remove()
    until(lambda: patched_methods() == before)


def test_a_failure_of_instrument_leaves_everything_as_it_was(monkeypatch):
    def fail(*_):
        raise RuntimeError("no hook")

    step, load = torch.amp.GradScaler.step, torch.utils.data.DataLoader.__iter__
    monkeypatch.setattr("resihp.instrumentation._instrument.ModulePasses", fail)
    with pytest.raises(RuntimeError, match="no hook"):
        resihp.instrument(Model(), client=Sidecar())
    assert torch.amp.GradScaler.step is step
    assert torch.utils.data.DataLoader.__iter__ is load


@pytest.mark.parametrize("job", ["loop", "another"])
def test_a_second_call_for_a_model_ends_the_first_monitor(observe, caplog, job):
    first = observe()
    first.step()
    second = observe(first.model, job=job)
    second.step()
    until(lambda: any(beat.left for beat in first.sidecar.heartbeats))
    assert first.sidecar.records.op.tolist() == [FORWARD, BACKWARD, OPTIMIZER]
    assert second.passes() == one_step(0)
    assert not caplog.text


def test_a_second_call_that_fails_leaves_the_first_monitor_as_it_was(observe):
    loop = observe()
    loop.step()
    with pytest.raises(ContractError, match="optimizer"):
        resihp.instrument(loop.model, "adam", job="loop", client=Sidecar(), rank=0)
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)


def test_models_of_one_process_need_names_of_their_own(observe, caplog):
    first, second = observe(), observe(rank=1)
    assert not caplog.text
    third = observe()
    assert caplog.text.count("give each its own `job=`") == 1
    for loop in (first, second, third):
        loop.step()
        assert loop.passes() == one_step(0)


def test_waiting_is_told_for_each_model_of_a_process(observe, hands, monkeypatch):
    monkeypatch.setattr(torch.distributed.Work, "wait", lambda _: hands.pass_ms(10))

    def wait(y):
        hands.pass_ms(4)
        torch.distributed.Work().wait()
        return y

    loops = [observe(Model(wait), job=name, clock=hands.clock) for name in ("one", "two")]
    for loop in loops:
        loop.model(torch.ones(2, 3, 4)).sum().backward()
    for loop in loops:
        loop.optimizer.step()
        records = loop.records()
        assert records.op.tolist() == [FORWARD, BACKWARD, OPTIMIZER]
        assert records.compute_ms.tolist() == [4, 0, 0]
        assert records.wait_ms.tolist() == [10, 0, 0]


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (torch._C.Future, "wait", lambda: torch.futures.Future().wait()),  # as of `get_future`
        (torch.distributed.ProcessGroup, "monitored_barrier", torch.distributed.monitored_barrier),
    ],
)
def test_waiting_beside_that_for_works_is_told(
    alone, observe, hands, monkeypatch, owner, name, call
):
    def pass_ms(*args, **kwargs):
        hands.pass_ms(10)

    def wait(y):
        hands.pass_ms(4)
        call()
        return y

    monkeypatch.setattr(owner, name, pass_ms)
    loop = observe(Model(wait), clock=hands.clock)
    loop.step()
    records = loop.records()
    assert records.compute_ms.tolist() == [4, 0, 0]
    assert records.wait_ms.tolist() == [10, 0, 0]
    loop.monitor.remove()
    assert getattr(owner, name) is pass_ms


def test_waiting_of_another_ddp_in_the_same_graph_is_no_time_of_the_model(alone, observe, hands):
    def backward_takes(ms):
        def form(y):
            y.register_hook(lambda _: hands.pass_ms(ms))
            return 1 * y

        return form

    loop = observe(Model(backward_takes(7)), clock=hands.clock)
    other = DistributedDataParallel(Model(backward_takes(100)))

    def reduce(loop, bucket):
        reduced = torch.futures.Future()

        def end():
            with contextlib.suppress(AssertionError):
                until(lambda: loop.monitor._recording.open.waiting, 5.0)
            hands.pass_ms(30)
            reduced.set_result(bucket.buffer())

        threading.Thread(target=end).start()
        return reduced

    other.register_comm_hook(loop, reduce)
    other(loop.model(torch.ones(2, 3, 4))).sum().backward()
    loop.optimizer.step()
    records = loop.records()
    assert records.op.tolist() == [FORWARD, BACKWARD, OPTIMIZER]
    assert records.compute_ms.tolist() == [0, 7, 0]
    assert records.wait_ms.tolist() == [0, 30, 0]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_model_in_place_of_one_that_ended_needs_no_name(observe, caplog, is_removed):
    first = observe()
    first.model.cycle = [first.model]
    if is_removed:
        first.monitor.remove()
    else:
        del first.model
    observe()
    assert not caplog.text


class OnDevice(Model):
    """Says that its parameters are on a CUDA device."""

    def __init__(self, device) -> None:
        super().__init__()
        self.device = torch.device(device)

    def parameters(self, recurse=True):
        for parameter in super().parameters(recurse):
            yield SimpleNamespace(device=self.device, is_cuda=self.device.type == "cuda")
            yield parameter


@pytest.mark.parametrize(("device", "told"), [("cuda:3", 1), ("cuda:2", 0), ("cpu", 0)])
def test_a_model_on_another_device_than_the_current_one_is_told(device, told, monkeypatch, caplog):
    monitors = [resihp.instrument(OnDevice(device), job="loop", client=Sidecar())]
    assert "set_device" not in caplog.text
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monitors.append(resihp.instrument(OnDevice(device), job="other", client=Sidecar()))
    for monitor in monitors:
        monitor.remove()
    assert caplog.text.count("call `torch.cuda.set_device(3)` before `instrument`") == told


def test_a_monitor_ends_with_its_model(no_collection):
    loop = Observed()
    sidecar = loop.sidecar
    loop.step()
    del loop
    until(lambda: any(beat.left for beat in sidecar.heartbeats))
    assert sidecar.records.op.tolist() == [FORWARD, BACKWARD, OPTIMIZER]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_model_in_place_of_another_leaves_one_process_that_beats(
    observe, no_collection, is_removed
):
    first = observe(heartbeat_s=0.01)
    first.step()
    until(lambda: first.sidecar.heartbeats)
    if is_removed:
        first.monitor.remove()
    else:
        del first.model
    second = observe(sidecar=first.sidecar, heartbeat_s=0.01)
    second.step()
    beats = first.sidecar.heartbeats
    old = beats[0].process
    until(lambda: any(beat.left for beat in beats))
    assert {beat.process for beat in beats if beat.left} == {old}
    seen = len(beats)
    until(lambda: len(beats) > seen + 2)
    assert old not in {beat.process for beat in beats[seen + 1 :]}


def test_an_attribute_that_others_have_wrapped_since_is_left_to_them(monkeypatch):
    class Trainer:
        def step(self):
            return ["step"]

    def adding(word):
        return lambda original: lambda trainer: [word, *original(trainer)]

    ours, theirs = Patches(), Patches()
    ours.wrap(Trainer, "step", adding("ours"))
    theirs.wrap(Trainer, "step", adding("theirs"))
    assert Trainer().step() == ["theirs", "ours", "step"]
    wrapped = Trainer.step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", lambda trainer: ["other", *wrapped(trainer)])
        ours.remove()
        assert Trainer().step() == ["other", "theirs", "ours", "step"]
    theirs.remove()
    assert Trainer().step() == ["step"]


def test_torch_without_engine_callbacks(observe, monkeypatch, caplog):
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", object())
    loop = observe()
    for _ in range(2):
        output = loop.model(torch.ones(2, 3, 4))
        gradients = torch.ones_like(output)
        monkeypatch.undo()
        output.backward(gradients)
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", object())
        loop.optimizer.step()
    records = loop.records()
    assert records.op.tolist() == 2 * [FORWARD, OPTIMIZER]
    assert np.isnan(records.wait_ms).all()  # unknown
    assert caplog.text.count("does not tell waiting") == 1


def compiled_in_place(model):
    model.first.compile(backend="eager")
    return model


def with_a_compiled_layer(model):
    model.first = torch.compile(model.first, backend="eager")
    return model


def with_a_compiled_method(model):
    model.first.forward = torch.compile(model.first.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    ("compiled", "tensor", "is_known"),
    [
        (lambda model: model, (0, 1), True),
        (compiled_in_place, (0,), True),
        (compiled_in_place, (0, 1), False),
        (with_a_compiled_layer, (0, 1), False),
        (with_a_compiled_method, (0, 1), False),
        (lambda model: torch.compile(model, backend="eager"), (0, 1), False),
    ],
)
def test_waiting_of_a_compiled_tensor_parallel_model_is_unknown(
    observe, monkeypatch, caplog, compiled, tensor, is_known
):
    described = RankDescription(0, tensor)
    monkeypatch.setattr("resihp.instrumentation._instrument.describe_module", lambda *_: described)
    loop = observe(compiled(Model()))
    loop.step()
    assert loop.passes() == one_step(0)
    assert np.isnan(loop.records().wait_ms).all() != is_known
    assert ("which hides its collectives" in caplog.text) != is_known


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.distributed, "Work"),
        (torch._C, "Future"),
        (torch.distributed.ProcessGroup, "monitored_barrier"),
    ],
)
def test_torch_without_a_wait_to_observe(observe, monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    wait_tensor = torch.distributed._functional_collectives.wait_tensor
    loop = observe()
    loop.step()
    records = loop.records()
    assert records.op.tolist() == [op for _, op, _ in one_step(0)]
    assert np.isnan(records.wait_ms).all()
    assert torch.distributed._functional_collectives.wait_tensor is wait_tensor


def test_failures_are_counted_and_training_goes_on(observe):
    def lengths(args, kwargs):
        raise KeyError("lengths")

    loop = observe(lengths=lengths)
    loop.step()
    assert loop.passes() == one_step(0)
    assert loop.monitor.stats.failures == 1


@pytest.mark.parametrize("broken", ["begin", "end", "begin_final_wait"])
def test_failures_in_any_pass_are_counted_and_training_goes_on(observe, monkeypatch, broken):
    def fail(*args, **kwargs):
        raise KeyError(broken)

    monkeypatch.setattr(PassTimer, broken, fail)
    loop = observe()
    loop.step(microbatches=2)
    assert loop.monitor.stats.failures >= 2


@pytest.mark.parametrize("target", [None, 3, torch.ones(1), torch.optim.SGD])
def test_other_targets_are_refused(target):
    with pytest.raises(ContractError, match="target"):
        resihp.instrument(target)


@pytest.mark.parametrize(
    "option",
    [
        {"job": "team/run"},
        {"job": "x" * 129},
        {"job": 7},
        {"microbatches": -3},
        {"microbatches": 0},
        {"microbatches": 2.5},
        {"layout": "x"},
        {"actions": ("quota",)},
    ],
)
def test_what_no_job_can_have_is_refused(option):
    wait = torch.distributed.Work.wait
    with pytest.raises(ContractError):
        resihp.instrument(Model(), **{"job": "loop", **option})
    assert torch.distributed.Work.wait is wait


def test_other_optimizers_are_refused():
    wait, load = torch.distributed.Work.wait, torch.utils.data.DataLoader.__iter__
    with pytest.raises(ContractError, match="optimizer"):
        resihp.instrument(Model(), "adam", client=Sidecar())
    assert torch.distributed.Work.wait is wait
    assert torch.utils.data.DataLoader.__iter__ is load


class Wrapper:
    """A wrapper that is no optimizer of torch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Idle(torch.optim.Optimizer):
    """A wrapper whose own steps are none, as that of Accelerate for DeepSpeed."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = []


@pytest.mark.parametrize("wrapped", [Wrapper, Idle, lambda optimizer: Idle(Wrapper(optimizer))])
def test_wrapped_optimizers_count(wrapped):
    model = Model()
    copies = [parameter.detach().clone() for parameter in model.parameters()]  # as of ZeRO
    optimizer = torch.optim.SGD(copies, lr=1e-3)
    sidecar = Sidecar()
    monitor = resihp.instrument(model, [wrapped(optimizer)], job="loop", client=sidecar, rank=0)
    with contextlib.closing(monitor):
        model(torch.ones(2, 3, 4)).sum().backward()
        optimizer.step()
        monitor.close(300.0)
        monitor.remove()
    assert sidecar.records.op.tolist() == [FORWARD, BACKWARD, OPTIMIZER]


class SharpnessAware(torch.optim.Optimizer):
    """An optimizer whose updates are those of one that it makes, as SAM's."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=1e-3)

    def second_step(self):
        self.base_optimizer.step()


class Averaging(torch.optim.Optimizer):
    """A wrapper of an optimizer that passes steps on, as `PostLocalSGDOptimizer`."""

    def __init__(self, parameters):
        self.optim = torch.optim.SGD(parameters, lr=1e-3)
        self.param_groups = self.optim.param_groups

    def second_step(self):
        self.optim.step()


@pytest.mark.parametrize("kind", [SharpnessAware, Averaging])
def test_optimizers_that_the_given_one_wraps_count(kind):
    model, sidecar = Model(), Sidecar()
    optimizer = kind(model.parameters())
    monitor = resihp.instrument(model, optimizer, job="loop", client=sidecar, rank=0)
    with contextlib.closing(monitor):
        model(torch.ones(2, 3, 4)).sum().backward()
        optimizer.second_step()
        monitor.close(300.0)
        monitor.remove()
    assert sidecar.records.op.tolist() == [FORWARD, BACKWARD, OPTIMIZER]


def test_an_optimizer_that_is_made_in_place_of_the_given_one_counts(observe):
    loop = observe()
    loop.step()
    loop.optimizer = torch.optim.Adam(loop.model.parameters())
    other = Model()
    torch.optim.SGD(other.parameters(), lr=1e-3).step()
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)


@pytest.mark.parametrize("optimizer", [True, False])
def test_an_optimizer_that_is_made_for_replaced_parameters_counts(observe, optimizer):
    loop = observe(optimizer=optimizer)
    for _ in range(2):
        loop.step()
        loop.model.first, loop.model.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-3)
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1) + one_step(2)


def test_an_optimizer_whose_parameters_are_replaced_counts(observe, monkeypatch):
    loop = observe(optimizer=False)
    looked = []
    named_parameters = loop.model.named_parameters
    monkeypatch.setattr(
        loop.model,
        "named_parameters",
        lambda *a, **k: looked.append(1) or named_parameters(*a, **k),
    )
    other = torch.optim.SGD(Model().parameters(), lr=1e-3)
    for _ in range(9):
        loop.model(torch.ones(2, 3, 4)).sum().backward()
        other.step()
        loop.optimizer.step()
    assert len(looked) < 9, "the other one is not looked at in each step"
    other.param_groups[0]["params"] = list(loop.model.parameters())
    loop.optimizer = other
    for _ in range(3):
        loop.step()
    assert loop.monitor.current_step == 11
    assert loop.passes()[-3:] == one_step(10)


@pytest.fixture
def swaps():
    """Conversions of modules swap parameters, as they always do with DTensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("is_removed", [True, False])
def test_parameters_may_be_swapped(observe, no_collection, swaps, is_removed):
    loop = observe()
    loop.step()
    if is_removed:
        loop.monitor.remove()
    loop.model.double().float()
    loop.model.load_state_dict(Model().state_dict())
    loop.step()
    assert loop.passes() == one_step(0) + ([] if is_removed else one_step(1))


@pytest.mark.parametrize("by_hand", [True, False])
def test_updates_that_are_never_seen_are_told_once(observe, monkeypatch, caplog, by_hand):
    monkeypatch.setattr("resihp.instrumentation._pass_timer._MANY_PASSES", 3)
    loop = observe()
    copies = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.optimizer = torch.optim.SGD(copies, lr=1e-3)
    with loop.monitor.step() if by_hand else contextlib.nullcontext():
        for _ in range(8):
            loop.step()
    assert caplog.text.count("no update of an optimizer") == (not by_hand)


def test_updates_that_are_seen_no_more_are_told(observe, monkeypatch, caplog):
    monkeypatch.setattr("resihp.instrumentation._pass_timer._MANY_PASSES", 3)
    model = Model()
    loop = observe(model, torch.optim.SGD(model.first.parameters(), lr=1e-3))
    loop.step(microbatches=2)
    loop.step(microbatches=8)
    assert "no update of an optimizer" not in caplog.text
    loop.optimizer = torch.optim.SGD(model.second.parameters(), lr=1e-3)
    for _ in range(90):
        loop.step()
    assert caplog.text.count("80 forward passes and no update of an optimizer") == 1


def test_an_optimizer_that_is_given_the_parameters_later_counts(observe):
    loop = observe(optimizer=False)
    other = Model()
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
    optimizer.step()
    optimizer.add_param_group({"params": list(loop.model.parameters())})
    loop.optimizer = optimizer
    loop.step()
    assert loop.passes() == one_step(0)


def test_blocks_have_start_and_stop(observe):
    loop = observe()
    monitor = loop.monitor
    monitor.remove()
    step = monitor.step().start()
    block = monitor.forward(seq_lens=[4]).start()
    waiting = monitor.waiting().start()
    waiting.stop()
    block.stop()
    broken = monitor.backward().start()
    broken.cancel()
    transfer = monitor.p2p(peer=1).start()
    transfer.stop()
    step.stop()
    assert loop.passes() == [(0, FORWARD, 0), (0, int(Op.P2P), -1)]
    assert monitor.current_step == 1
