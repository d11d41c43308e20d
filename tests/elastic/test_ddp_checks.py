"""What would silently differ or block between replicas is refused, with what to do instead."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, spectral_norm
from torch.testing._internal.distributed.fake_pg import FakeStore

from resihp import elastic
from resihp.contracts import ContractError, Layout, Plan, Replica, Stage
from resihp.elastic.ddp.checks import check_model, check_optimizers, fingerprint
from resihp.elastic.ddp.init import init_replica_group
from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import ReplicaCoordinates
from resihp.elastic.rendezvous.environment import Environment
from resihp.elastic.rendezvous.store import host_store

ALONE = ReplicaCoordinates(0, 4)


@pytest.fixture
def four_processes() -> Iterator[None]:
    """This process, as the first of four that talk to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_process() -> Iterator[None]:
    """This process, as the only one of its replica."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "running statistics"),
    "InstanceNorm": (
        lambda: nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 4)),
        "running statistics",
    ),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), "in each forward"),
    "spectral_norm, by hook": (lambda: spectral_norm(nn.Linear(4, 4)), "in each forward"),
    "sparse": (lambda: nn.Embedding(8, 4, sparse=True), "sparse=False"),
    "frozen": (lambda: linear().requires_grad_(False), "none of its parameters is trained"),
    "DDP over all": (lambda: DistributedDataParallel(linear()), "one group or mesh per replica"),
    "FSDP2 over all": (lambda: fully_shard(linear()), "one group or mesh per replica"),
    "FSDP1": (
        lambda: FullyShardedDataParallel(linear(), device_id=torch.device("cpu")),
        "use fully_shard",
    ),
}


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    build, told = MODELS[name]
    with pytest.raises(ContractError, match=told):
        check_model(build(), ALONE)


@pytest.mark.usefixtures("four_processes")
def test_what_stays_within_a_replica_is_welcome() -> None:
    replica = ReplicaCoordinates(1, 2, members=4)
    check_model(DistributedDataParallel(linear()), replica)
    check_model(fully_shard(linear()), replica)
    check_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), ALONE)
    check_model(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4)), ALONE)
    check_model(parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), ALONE)


@pytest.mark.usefixtures("four_processes")
def test_gradients_in_the_buckets_of_ddp() -> None:
    """Sums of them would change with the next microbatch."""
    model = DistributedDataParallel(linear(), gradient_as_bucket_view=True)
    with pytest.raises(ContractError, match="leave gradient_as_bucket_view=False"):
        check_model(model, ReplicaCoordinates(1, 2, members=4))


@pytest.mark.usefixtures("four_processes")
def test_no_sync_within_a_replica() -> None:
    model = DistributedDataParallel(linear())
    check_model(model, ReplicaCoordinates(0, 1, members=4))
    with model.no_sync(), pytest.raises(ContractError, match="each microbatch's gradients"):
        model(torch.ones(1, 4))


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_with_parameters_that_are_not() -> None:
    """Backward writes to their gradients as to those of any other model."""
    store = host_store("127.0.0.1", 0, timedelta(seconds=10))
    model = linear()
    fully_shard(model, ignored_params=set(model[1].parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(0, 1, "127.0.0.1", store.port, "job", False, False)
    replicas = Replicas(model, optimizer, microbatches=3, environment=environment)
    for step in replicas.steps(2):
        for _ in step:
            compute(model)
        optimizer.step()
    assert replicas.completed == 2
    del store  # not before


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("moment", ["before the replicas are made", "behind backward"])
def test_a_sharded_model_that_is_evaluated(moment: str) -> None:
    """It leaves the parameters of the root gathered."""
    store = host_store("127.0.0.1", 0, timedelta(seconds=10))
    plain, model = linear(), linear()
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = torch.optim.SGD(plain.parameters(), lr=0.01)

    def evaluate(at: str) -> None:
        if at == moment:
            with torch.no_grad():
                model(torch.ones(1, 4))

    evaluate("before the replicas are made")
    environment = Environment(0, 1, "127.0.0.1", store.port, "job", False, False)
    replicas = Replicas(model, optimizer, microbatches=3, environment=environment)
    for step in replicas.steps(2):
        for _ in step:
            loss = compute(model)
            torch.testing.assert_close(loss, compute(plain))
        evaluate("behind backward")
        for each in (optimizer, expected):
            each.step()
        expected.zero_grad()
    assert replicas.completed == 2
    del store  # not before


@pytest.mark.parametrize("timeout", [None, timedelta(minutes=7)])
def test_the_store_of_a_replica_waits_as_long_as_its_group(timeout: timedelta | None) -> None:
    """NCCL waits in it for processes that come late to the first exchange."""
    store = host_store("127.0.0.1", 0, timedelta(seconds=10))
    environment = Environment(0, 1, "127.0.0.1", store.port, "job", False, False)
    init_replica_group(1, "gloo", timeout=timeout, environment=environment)
    try:
        given = dist.distributed_c10d._get_default_store().timeout
    finally:
        dist.destroy_process_group()
    assert given == (timeout or dist.default_pg_timeout)
    del store  # not before


def test_hooks_that_act_before_the_sum() -> None:
    model = linear()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ContractError, match="before that is summed"):
        check_model(model, ALONE)


def test_members_that_do_not_fill_replicas() -> None:
    environment = Environment(0, 6, "127.0.0.1", 1, "job", False, False)
    with pytest.raises(ContractError, match="6 processes are no replicas of 4 each"):
        ReplicaCoordinates.of(environment, 4)


def test_parameters_that_are_not_summed() -> None:
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    with pytest.raises(ContractError, match="not the model's"):
        check_optimizers(linear(), [optimizer])


def test_settings_of_an_optimizer_are_compared_whatever_their_form() -> None:
    def told(**settings: object) -> float:
        optimizer = torch.optim.AdamW(linear().parameters(), lr=0.1)
        optimizer.param_groups[0].update(settings)
        return fingerprint([optimizer])

    assert told() == told() == told(lr=torch.tensor(0.1, dtype=torch.float64))
    changed = [told(lr=0.2), told(betas=(0.9, 0.99)), told(betas=(0.8, 0.999))]
    changed += [told(scales=torch.tensor([1.0, 2.0])), told(scales=torch.tensor([1.0, 3.0]))]
    assert len({told(), *changed}) == 6


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_names_of_the_state_that_are_taken(name: str) -> None:
    """What is under them would be sent to joiners in place of the model."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(0, 1, "127.0.0.1", 1, "job", False, False)
    with pytest.raises(ContractError, match="use other names"):
        Replicas(model, optimizer, microbatches=3, state={name: linear()}, environment=environment)


Made = tuple[nn.Module, torch.optim.Optimizer, Replicas]


@pytest.fixture
def made() -> Iterator[Made]:
    """A job of one replica."""
    store = host_store("127.0.0.1", 0, timedelta(seconds=10))
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(0, 1, "127.0.0.1", store.port, "job", False, False)
    yield model, optimizer, Replicas(model, optimizer, microbatches=3, environment=environment)
    del store  # not before


def compute(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(1, 4)).square().sum()
    loss.backward()
    return loss


def misuse(made: Made, inside: Callable[[int], None]) -> str:
    """What a loop is told that does `inside` with each microbatch."""
    with pytest.raises(ContractError) as caught:  # noqa: PT012
        for step in made[2].steps(2):
            for index in step:
                inside(index)
    return str(caught.value)


def test_an_update_in_the_inner_loop(made: Made) -> None:
    model, optimizer, _ = made

    def inside(_: int) -> None:
        compute(model)
        optimizer.step()

    assert "an update before all of its microbatches were taken" in misuse(made, inside)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_update_that_computes_gradients_itself(made: Made, by_name: bool) -> None:
    """As LBFGS does; other optimizers take a closure, too."""
    model, optimizer, replicas = made

    def closure() -> float:
        optimizer.zero_grad()
        return float(compute(model))

    with pytest.raises(ContractError, match="not summed over the replicas"):  # noqa: PT012
        for step in replicas.steps(1):
            for _ in step:
                compute(model)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            if by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_zeroed_in_the_inner_loop(to_none: bool, made: Made) -> None:
    model, optimizer, _ = made

    def inside(_: int) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        compute(model)

    assert "belong behind the inner loop" in misuse(made, inside)


def test_gradients_clipped_in_the_inner_loop(made: Made) -> None:
    def inside(_: int) -> None:
        compute(made[0])
        nn.utils.clip_grad_norm_(made[0].parameters(), 0.1)

    assert "belong behind the inner loop" in misuse(made, inside)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph(made: Made) -> None:
    def inside(_: int) -> None:
        made[0](torch.ones(1, 4)).square().sum().backward(create_graph=True)

    assert "by torch.autograd.grad(..., create_graph=True)" in misuse(made, inside)


@pytest.mark.parametrize("skipped", range(3))
def test_a_microbatch_without_backward(skipped: int, made: Made) -> None:
    """As one is left out whose loss is not finite."""

    def inside(index: int) -> None:
        if index != skipped:
            compute(made[0])

    assert "call backward()" in misuse(made, inside)


def test_a_norm_that_is_trained_again() -> None:
    """It was in `eval()` when the replicas were made."""
    store = host_store("127.0.0.1", 0, timedelta(seconds=10))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(0, 1, "127.0.0.1", store.port, "job", False, False)
    replicas = Replicas(model, optimizer, microbatches=3, environment=environment)
    with pytest.raises(ContractError, match="running statistics"):  # noqa: PT012
        for step in replicas.steps(1):
            model.train()
            for _ in step:
                compute(model)
    del store  # not before


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_fixed_order_of_sums_that_fp32_cannot_hold(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(0, 1, "127.0.0.1", 1, "job", False, False)
    with pytest.raises(ContractError, match=f"deterministic: .* {str(dtype)[6:]}"):
        Replicas(model, optimizer, microbatches=2, deterministic=True, environment=environment)


@pytest.mark.parametrize("microbatches", [0, -3, 4.0])
def test_a_number_of_microbatches_that_cannot_be(microbatches: int) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(0, 1, "127.0.0.1", 1, "job", False, False)
    with pytest.raises(ContractError, match="an integer of 1 or more"):
        Replicas(model, optimizer, microbatches=microbatches, environment=environment)


def test_weights_with_some_microbatches_only(made: Made) -> None:
    model, _, replicas = made
    with pytest.raises(ContractError, match="with every microbatch of a step, or with none"):  # noqa: PT012
        for step in replicas.steps(1):
            for index in step:
                step.report(compute(model), weight=2.0 if index else None)


def test_numbers_of_numpy_are_reported_as_any_others(made: Made) -> None:
    model, _, replicas = made
    for step in replicas.steps(1):
        for _ in step:
            compute(model)
            step.report(np.float32(4.0), weight=np.int64(2))  # type: ignore[arg-type]
    assert (step.loss, step.weight) == (2.0, 6.0)


def test_a_loop_may_add_to_a_loss_that_it_has_reported(made: Made) -> None:
    model, _, replicas = made
    for step in replicas.steps(1):
        total = torch.zeros(())
        for index in step:
            loss = compute(model).detach()
            step.report(loss)
            total = loss if index == 0 else total.add_(loss)
    assert step.loss == pytest.approx(float(total))


def test_infinite_losses_of_either_sign_are_no_end_of_the_loop(made: Made) -> None:
    """Their sum is no number, which the loop may skip."""
    model, _, replicas = made
    for step in replicas.steps(1):
        for index in step:
            compute(model)
            step.report((math.inf, -math.inf, 1.0)[index])
    assert math.isnan(step.loss)


def test_a_loss_that_is_not_one_number(made: Made) -> None:
    with pytest.raises(ContractError, match="a loss is one number"):  # noqa: PT012
        for step in made[2].steps(1):
            for _ in step:
                step.report(torch.ones(3))


def test_a_step_that_is_left_in_the_middle(made: Made) -> None:
    with pytest.raises(ContractError, match="not all of its microbatches were taken"):  # noqa: PT012
        for step in made[2].steps(2):
            for _ in step:
                compute(made[0])
                break


def test_steps_a_second_time(made: Made) -> None:
    for step in made[2].steps(1):
        for _ in step:
            compute(made[0])
    with pytest.raises(ContractError, match="call it once"):
        next(made[2].steps(2))


def test_a_plan_without_a_replica_that_is_alive(made: Made) -> None:
    plan = Plan(version=1, layout=Layout((Replica((Stage((1,), (0, 1)),)),)), quotas=(3,))
    with pytest.raises(ContractError, match=r"its replicas \[0\] stay"):
        made[2]._read(plan)


def test_a_default_device_of_the_loop_is_that_of_its_own_tensors_alone(made: Made) -> None:
    """As after `torch.set_default_device`; "meta" stands in for a device."""
    model, optimizer, replicas = made
    x = torch.ones(1, 4)
    with torch.device("meta"):
        for step in replicas.steps(2):
            for _ in step:
                loss = model(x).square().sum()
                loss.backward()
                step.report(loss)
            optimizer.step()
    assert step.loss > 0.0


MAKERS = {
    "arange",
    "empty",
    "empty_strided",
    "full",
    "linspace",
    "ones",
    "randn",
    "tensor",
    "zeros",
}


def test_tensors_are_made_on_a_device_that_is_told() -> None:
    """Elsewhere they would be on the default device of the loop."""
    made = [
        (path.name, node)
        for path in Path(elastic.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
    ]
    assert len(made) > 40
    untold = [
        f"{name}:{node.lineno}"
        for name, node in made
        if not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not untold
