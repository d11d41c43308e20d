"""Two processes over gloo: DDP, FSDP2, a peer's memory, and agreement on what is skipped."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from resihp.checkpoint import (
    Checkpointer,
    HostMemory,
    IndependentRank,
    LazyWriter,
    LocalDisk,
    PeerMemory,
    SharedStorage,
    checkpointer,
    vote,
)
from resihp.checkpoint.levels.level import CheckpointReader
from resihp.checkpoint.restore import restore
from resihp.contracts import ContractError
from resihp.testing.local_ranks import LocalRanks
from tests.checkpoint.helpers import SlowDisk, load_by_torch, run_python

WORLD, STEPS = 2, 3


def on_two_ranks(folder: Path, target: Callable[..., None], *arguments: object) -> None:
    with LocalRanks(target.__name__, folder / "logs") as ranks:
        ranks.start(range(WORLD), _joined, target, *arguments)
        codes = ranks.wait(300)
        assert set(codes.values()) == {0}, ranks.logs()


def _joined(rank: int, host: str, port: int, target: Callable[..., None], *rest: object) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(target.__name__, store), rank=rank, world_size=WORLD
    )
    try:
        target(rank, *rest)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def network() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.GELU(), torch.nn.Linear(33, 3))


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> None:
    for step in steps:
        torch.manual_seed(100 * step + rank)
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All of the parameters on every rank."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def ddp(rank: int, folder: Path) -> None:
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer([LocalDisk(folder)]) as saver:
        saver.attach(optimizer)
        for step in range(STEPS):
            train(wrapped, optimizer, rank, range(step, step + 1))
            saver.save(step, {"model": model, "optimizer": optimizer}, extra={"rank": rank})
            assert saver.wait()
            dist.barrier()
        assert not saver.counters.failures
        expected = whole(model)
        train(wrapped, optimizer, rank, range(STEPS, STEPS + 2))
        after = whole(model)
        again = network()
        other = torch.optim.AdamW(again.parameters())
        restored = saver.restore({"model": again, "optimizer": other})
        assert (restored.step, restored.extra) == (STEPS - 1, {"rank": rank})
        assert all(torch.equal(p, expected[n]) for n, p in whole(again).items())
        train(DistributedDataParallel(again), other, rank, range(STEPS, STEPS + 2))
        assert all(torch.equal(p, after[n]) for n, p in whole(again).items())
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def test_ddp_writes_everything_once_and_resumes_bit_equal(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, ddp, tmp_path)
    sizes = [(tmp_path / f"step-000000002/__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert min(sizes) > 0.3 * max(sizes), "both ranks write a share"
    into = {"model": network()}
    restore([LocalDisk(tmp_path)], into, IndependentRank())
    expected = torch.load(tmp_path / "expected.pt")
    assert all(torch.equal(p, expected[n]) for n, p in whole(into["model"]).items())


def fsdp(rank: int, folder: Path) -> None:
    model = network()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    levels = [LocalDisk(folder / "disk"), SharedStorage(f"file://{folder}/shared")]
    with Checkpointer(levels) as saver:
        saver.attach(optimizer)
        for step in range(STEPS):
            train(model, optimizer, rank, range(step, step + 1))
            parameters, moments = get_state_dict(model, optimizer)
            saver.save(step, {"model": parameters, "optimizer": moments})
            assert saver.wait()
            dist.barrier()
        assert not saver.counters.failures
        expected = whole(model)
        train(model, optimizer, rank, range(STEPS, STEPS + 2))
        after = whole(model)
        parameters, moments = get_state_dict(model, optimizer)
        into = {"model": parameters, "optimizer": moments}
        assert saver.restore(into).step == STEPS - 1
        set_state_dict(
            model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
        )
        assert all(torch.equal(p, expected[n]) for n, p in whole(model).items())
        train(model, optimizer, rank, range(STEPS, STEPS + 2))
        assert all(torch.equal(p, after[n]) for n, p in whole(model).items())
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def assert_torch_reads(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    load_by_torch(folder, into)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in expected.items())


def test_fsdp_resumes_bit_equal_and_torch_reads_it_unsharded(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, fsdp, tmp_path)
    for level in ("disk", "shared"):
        folder = tmp_path / level / "step-000000002"
        assert_torch_reads(folder, torch.load(tmp_path / "expected.pt"))


def lazily(rank: int, folder: Path) -> None:
    """torch plans and coordinates; each rank stages what it holds."""
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters())
    writer, apart = LazyWriter(folder / "none"), dist.new_group(backend="gloo")
    writer.attach(optimizer, model)
    for step in range(STEPS):
        train(model, optimizer, rank, range(step, step + 1))
        state = {"model": get_state_dict(model, optimizer)[0]}
        where = {"checkpoint_id": folder / f"{step}", "process_group": apart}
        saved = dcp.async_save(state, storage_writer=writer, **where)
        if rank == 0:
            torch.save(whole(model), folder / "expected.pt")
        else:
            whole(model)
        train(model, optimizer, rank, range(step + 50, step + 51))
        saved.upload_completion.result(100)
    writer.close()


def test_torch_saves_asynchronously_through_our_writer(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, lazily, tmp_path)
    folder = tmp_path / f"{STEPS - 1}"
    assert_torch_reads(folder, torch.load(tmp_path / "expected.pt"))
    assert {path.name for path in folder.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


def survivor(rank: int, folder: Path) -> None:
    """Rank 1 loses all that it has; its state comes back from the memory of rank 0."""
    own = HostMemory()
    peers = PeerMemory(own)
    peers.connect_group()
    mine = {f"part{rank}": torch.full((3_000_000,), float(rank)), "both": torch.arange(9.0)}
    saver = Checkpointer([own, peers])
    saver.prepare(mine)
    for step in range(3):
        saver.fence()
        mine[f"part{rank}"].add_(10.0)
        saver.save(step, mine, extra={"rank": rank})
        assert saver.wait()
        dist.barrier()
    assert not saver.counters.failures
    assert saver.counters.levels[peers.name].saved == 3
    if rank == 1:
        own.store.clear()
    dist.barrier()
    into = {f"part{rank}": torch.zeros(3_000_000), "both": torch.zeros(9)}
    restored = saver.restore(into)
    assert (restored.step, restored.extra) == (2, {"rank": rank})
    assert restored.level == (peers.name if rank == 1 or "both" not in _held(own) else own.name)
    assert torch.equal(into[f"part{rank}"], torch.full((3_000_000,), 30.0 + rank))
    assert torch.equal(into["both"], torch.arange(9.0))
    dist.barrier()
    saver.close()


def _held(own: HostMemory) -> set[str]:
    return {entry.key for index in own.store.indexes() for entry in index.entries}


def test_a_lost_state_comes_back_from_a_peers_memory(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, survivor, tmp_path)


def uneven(rank: int, folder: Path) -> None:
    """Rank 1 is slow; what it cannot take part in, rank 0 gives up as well."""
    state = {f"part{rank}": torch.zeros(2_000_000)}
    disk = SlowDisk(folder, 0.05 if rank else 0.0, keep=500)
    saver = Checkpointer([disk])
    saver.prepare(state)
    deadline = time.monotonic() + 300
    for step in count():
        saver.fence()
        state[f"part{rank}"].fill_(step)
        saver.save(step, state)
        enough = [len(disk.steps()) >= 4 or time.monotonic() > deadline]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    saver.close()
    dist.barrier()
    assert not saver.counters.failures
    assert max(disk.steps()) == step, "the last state is saved, whatever was skipped before"
    for step in disk.steps():
        into = {f"part{r}": torch.zeros(2_000_000) for r in range(WORLD)}
        restore([LocalDisk(folder)], into, IndependentRank(), step=step)
        assert all(bool((tensor == step).all()) for tensor in into.values())
    assert len(disk.steps()) >= 4


def test_ranks_skip_the_same_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    on_two_ranks(tmp_path, uneven, folder)
    newest = max(LocalDisk(folder).steps())
    unfinished = [int(path.name.split(".")[1][5:]) for path in folder.glob(".*.part")]
    assert all(step > newest for step in unfinished), "what was given up leaves nothing behind"


def growing(rank: int, folder: Path) -> None:
    """State of rank 1 alone gets new shapes, as of an expert that sees its first token late."""
    state = {f"part{rank}": torch.zeros(1000)}
    disk = LocalDisk(folder, keep=500)
    saver = Checkpointer([disk])
    deadline = time.monotonic() + 300
    for step in count():
        if rank and step == 3:
            state["late"] = torch.zeros(500)
        saver.fence()
        for tensor in state.values():
            tensor.fill_(step)
        saver.save(step, state)
        assert saver.wait(300)
        enough = [max(disk.steps(), default=0) > 4 or time.monotonic() > deadline]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    saver.close()
    assert not saver.counters.failures
    into = {"part0": torch.zeros(1000), "part1": torch.zeros(1000), "late": torch.zeros(500)}
    restored = restore([LocalDisk(folder)], into, IndependentRank())
    assert restored.step > 4
    assert all(bool((tensor == restored.step).all()) for tensor in into.values())
    assert disk.steps()[:3] == [0, 1, 2]


def test_state_that_grows_on_one_rank_alone(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, growing, tmp_path / "disk")


def refused(rank: int, folder: Path) -> None:
    """What one rank cannot save, or the ranks disagree on, costs that checkpoint on both."""
    good, other = {"a": torch.ones(4)}, {"a": torch.ones(5)}
    bad = {"a": torch.ones(4).to_sparse()}
    states = [bad, good, bad, other, good]
    disk = LocalDisk(folder, keep=9)
    saver = Checkpointer([disk])
    begun = []
    for step, uneven in enumerate(states):
        begun.append(saver.save(step, uneven if rank else good))
        saver.fence()
        assert saver.wait(300)
        dist.barrier()
    saver.close()
    assert begun == [False, True, not rank, not rank, True]
    said = " ".join(saver.counters.failures)
    texts = ("sparse_coo", "differs") if rank else ("cannot be saved on every rank",)
    assert all(text in said for text in texts)
    dist.barrier()
    assert disk.steps() == [1, 4]


def test_a_state_that_cannot_be_saved_on_one_rank_stalls_nobody(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, refused, tmp_path / "disk")


def late(rank: int, folder: Path) -> None:
    """Rank 1 is the last to write its part; rank 0 asks for the newest before that."""
    checkpointer._SETTLE_TIMEOUT_S = 300.0  # for a disk that is busy
    state, disk = {f"part{rank}": torch.zeros(1000)}, SlowDisk(folder, 0.0)
    saver = Checkpointer([disk])
    for step in range(2):
        disk.delay_s = 0.5 if rank and step else 0.0
        saver.fence()
        state[f"part{rank}"].fill_(step)
        saver.save(step, state)
        if not step:
            assert saver.wait(300)
            dist.barrier()
    assert saver.restore(state).step == 1
    saver.close()


def test_all_ranks_restore_the_newest_though_one_has_only_just_written_it(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, late, tmp_path / "disk")


TIMEOUTS = """
import torch.distributed as dist
from resihp.checkpoint import ProcessGroupRanks
made, new_group = [], dist.new_group
def recorded(*arguments, timeout, **named):
    made.append(timeout.total_seconds())
    return new_group(*arguments, timeout=timeout, **named)
dist.new_group = recorded
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = ProcessGroupRanks()
assert ranks.gather(1) == ranks.gather_in_background(1) == [1]
print(len(made), min(made))
dist.destroy_process_group()
"""


def test_a_rank_may_read_or_evaluate_for_half_an_hour() -> None:
    """Later than that it would break restores and votes for good; torch gives up then as well."""
    assert run_python(TIMEOUTS) == "2 1800.0\n"


def apart(rank: int, folder: Path) -> None:
    """Rank 1 reads slowly, and comes to a vote after rank 0 has given up waiting for it."""
    state = {f"part{rank}": torch.zeros(1000)}
    saver = Checkpointer([ReadsSlowly(folder, 2.0 * rank)])
    assert saver.save(0, state)
    assert saver.wait(300)
    saver.fence()
    state[f"new{rank}"] = torch.zeros(500)
    if rank == 0:
        vote.PATIENCE_S = 0.5
        assert not saver.save(1, state)
        dist.barrier()
        vote.PATIENCE_S = 60.0
    else:
        dist.barrier()
        assert saver.save(1, state)
    deadline = time.monotonic() + 300
    while saver._votes.newest.version < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    saver.fence()
    assert saver.wait(300)
    assert saver.save(2, state)
    saver.fence()
    assert saver.wait(300)
    dist.barrier()
    assert [saver.restore(state).step for _ in range(2)] == [2, 2]
    saver.close()


def unfillable(rank: int, folder: Path) -> None:
    """Rank 1 names a state that cannot be prepared, then one that cannot be filled."""
    saver = Checkpointer([LocalDisk(folder)])
    good = {"w": torch.arange(8.0)}
    with pytest.raises(ContractError, match="sparse_coo"):
        saver.prepare({"w": torch.ones(8).to_sparse()} if rank else good)
    saver.prepare(good)
    assert saver.save(1, good)
    assert saver.wait(300)
    dist.barrier()
    with pytest.raises(ContractError, match="is expanded"):
        saver.restore({"w": torch.zeros(1).expand(8) if rank else torch.zeros(8)})
    assert saver.newest_step() == saver.restore({"w": torch.zeros(8)}).step == 1
    saver.close()


def test_what_one_rank_cannot_fill_is_an_error_of_all(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, unfillable, tmp_path / "disk")


class ReadsSlowly(LocalDisk):
    """Takes `delay_s` to open a checkpoint."""

    def __init__(self, folder: Path, delay_s: float) -> None:
        super().__init__(folder)
        self._delay_s = delay_s

    def open(self, step: int) -> CheckpointReader:
        time.sleep(self._delay_s)
        return super().open(step)


def test_ranks_that_drift_apart_save_and_restore(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, apart, tmp_path / "disk")
