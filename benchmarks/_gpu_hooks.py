"""Hooks and `instrument` on a CUDA device: what they cost, and that they never wait for it."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resihp
from benchmarks import _instrument_worker as worker
from benchmarks._gpu_rows import Row, need_cuda
from benchmarks._hooks_worker import (
    LENGTHS,
    MICROBATCHES,
    REST_S,
    Repeated,
    ResiHP,
    Training,
    interleaved,
)
from benchmarks._resize_live import first_device
from benchmarks.hooks import sink
from resihp.client import Client
from resihp.contracts.codec import decode
from resihp.contracts.telemetry import Op
from resihp.testing.local_ranks import LocalRanks

QUIET_STEPS = 50
TOOLS = ("none", "hooks", "instrument", "callbacks")
LATE_MS, LATE_STEPS = 30.0, 20
"""A slow rank's delay of each step's backward pass, and the steps of that loop."""


def hooks(device: str, small: bool) -> Iterator[Row]:
    """What the blocks add to a step, on the device and on this machine's processor."""
    torch.set_num_threads(1)
    with sink() as address:
        here = _hook_costs("cpu", address, small)  # before CUDA is in use: with the host's clock
        there = _hook_costs(device, address, small)
    for name, words in (
        ("step_1", "hooks: added to a step of 1 microbatch"),
        ("step_8", f"hooks: added to a step of {MICROBATCHES} microbatches"),
        ("microbatch", "hooks: an empty microbatch block"),
    ):
        yield Row(words, there[name], "µs", here[name], "on the CPU")
    lost = there["dropped"] + there["failures"]
    yield Row("hooks: records dropped, and failures", lost, "", 0.0, "none")


def _hook_costs(device: str, address: str, small: bool) -> dict[str, float]:
    tool, seconds = ResiHP(address), 0.2 if small else 6.0
    found: dict[str, float] = {}
    for microbatches, burst in ((1, 40), (MICROBATCHES, 20)):
        training = Training(8, 1, microbatches, device)
        step = tool.around(training)
        training.step()
        step()
        added = interleaved(training.step, step, seconds, burst)
        found[f"step_{microbatches}"] = added["wall_us"]
    found["microbatch"] = _block_us(tool.monitor, 3 if small else 21)
    return found | tool.close()


def _block_us(monitor: Any, rounds: int, calls: int = 100) -> float:
    times = []
    for _ in range(rounds):
        time.sleep(calls * REST_S)
        begun = time.perf_counter()
        for _ in range(calls):
            with monitor.microbatch(seq_lens=LENGTHS):
                pass
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times) * 1e6


def instrument(device: str, small: bool) -> Iterator[Row]:
    """What `instrument` adds to a step, beside callbacks of torch that do nothing."""
    torch.set_num_threads(1)
    _join_alone(device)
    with sink() as address:
        tools = {name: worker.TOOLS[name](address) for name in TOOLS}
        for kind, microbatches in (("plain", 1), ("plain", 8), ("ddp", 1), ("ddp", 8)):
            loop = worker.Loop(kind, microbatches, device=device)
            loop.step()
            times = worker.interleaved(loop, tools, 0.2 if small else 6.0, 4 if small else 30)
            added = worker.summary(times)
            yield Row(
                f"instrument: added to a step of {microbatches} microbatches, {kind}",
                added["instrument"]["wall_us"],
                "µs",
                added["callbacks"]["wall_us"],
                "empty callbacks of torch",
            )
        counts = tools["instrument"].close()
    lost = counts["dropped"] + counts["failures"]
    yield Row("instrument: records dropped, and failures", lost, "", 0.0, "none")


def _join_alone(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
    worker.join(backend, 1)


def synchronizing(device: str, small: bool) -> Iterator[Row]:
    """Steps in which the training thread never waits for the device, or it is an error."""
    need_cuda(device)
    _join_alone(device)
    with sink() as address:
        for name, kind in (("hooks", "plain"), ("instrument", "plain"), ("instrument", "ddp")):
            tool = worker.TOOLS[name](address)
            step = tool.start(worker.Loop(kind, MICROBATCHES, device=device))
            made, why = quiet_steps(step, QUIET_STEPS)
            tool.stop()
            failures = tool.close()["failures"]
            note = why or (f"{failures} failures in the monitor" if failures else "")
            yield Row(
                f"{name}, {kind}: steps without a synchronize", made, "", QUIET_STEPS, "all", note
            )
    reads = worker.Loop("plain", 1, device=device)
    made, _ = quiet_steps(lambda: reads.forward().item(), QUIET_STEPS)
    yield Row("control: a loop that reads its loss", made, "", 0.0, "none: the check can fail")


def quiet_steps(step: Callable[[], object], count: int) -> tuple[int, str]:
    """Steps made until one synchronizes, `count` at most, and what stopped them.

    torch's debug mode sees what torch itself waits for; waits that Python code asks for are not
    among it, so those of this thread are refused beside it.
    """
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with _no_waiting():
        for made in range(count):
            try:
                step()
            except RuntimeError as error:
                return made, str(error).splitlines()[0][:80]
    return count, ""


@contextmanager
def _no_waiting() -> Iterator[None]:
    own, cuda = threading.get_ident(), torch.cuda

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == own:
                raise RuntimeError(f"the training thread called {original.__qualname__}")
            return original(*arguments, **options)

        return wait

    with ExitStack() as stack:
        for owner in (cuda, cuda.Event, cuda.Stream):
            wait = refuse(owner.synchronize)
            stack.enter_context(mock.patch.object(owner, "synchronize", wait))
        stack.callback(cuda.set_sync_debug_mode, cuda.get_sync_debug_mode())
        cuda.set_sync_debug_mode("error")
        yield


def graphs(device: str, small: bool) -> Iterator[Row]:
    """Blocks around the replay of a CUDA graph, and around its capture."""
    need_cuda(device)
    with sink() as address:
        monitor = resihp.Monitor(job="benchmark", url=address)
        eager = Training(256, 8, 1, device)
        yield _added("hooks: around an eager pass", _around(monitor, lambda: _pass(eager)))
        plain = Training(256, 8, 1, device)
        replay = _capture(plain).replay
        yield _added("hooks: around a replayed graph", _around(monitor, replay))
        inner = Training(256, 8, 1, device)
        with monitor.step(), monitor.forward(seq_lens=LENGTHS):
            captured = _capture(inner)
        captured.replay()
        eager.optimizer.zero_grad()
        _pass(eager)
        assert inner.model.weight.grad is not None
        assert eager.model.weight.grad is not None
        apart = (inner.model.weight.grad - eager.model.weight.grad).abs().max().item()
        yield Row("hooks: a graph captured within the blocks", apart, "apart", 0.0, "eager")
        monitor.close()
        yield Row("hooks: failures with graphs", monitor.stats.failures, "", 0.0, "none")


def _pass(training: Training) -> None:
    training.forward().backward()


def _capture(training: Training) -> torch.cuda.CUDAGraph:
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _pass(training)
    torch.cuda.current_stream().wait_stream(side)
    training.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _pass(training)
    return graph


def _around(monitor: Any, work: Callable[[], None]) -> dict[str, float]:
    def tooled() -> None:
        with monitor.step(), monitor.forward(seq_lens=LENGTHS):
            work()

    tooled()
    return interleaved(work, tooled, 3.0, 20)


def _added(name: str, found: dict[str, float]) -> Row:
    return Row(name, found["wall_us"], "µs", found["step_us"], "the pass itself")


def ddp_waits(device: str, small: bool) -> Iterator[Row]:
    """Waiting in DDP's backward that a rank tells, when the other one is late each time."""
    with tempfile.TemporaryDirectory() as folder, LocalRanks("ddp", Path(folder)) as ranks:
        ranks.start((0, 1), run_late_rank, device, folder)
        codes = ranks.wait(90)
        assert set(codes.values()) == {0}, ranks.logs()
        told = [json.loads((Path(folder) / f"waits-{rank}.json").read_text()) for rank in (0, 1)]
    words = f"DDP's backward: wait told by {{}} ({LATE_MS:.0f} ms late)"
    yield Row(words.format("the early rank"), told[0], "ms", LATE_MS, "delay of the other one")
    yield Row(words.format("the late rank"), told[1], "ms", 0.0, "none")


def run_late_rank(rank: int, host: str, port: int, device: str, folder: str) -> None:
    """One of two ranks of DDP over gloo; the second one comes late to each backward pass."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    where = first_device(device)
    model = DistributedDataParallel(Repeated(256, 4, str(where)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(256, 256, device=where)
    with sink() as address:
        client = KeepingClient(address)
        monitor = resihp.instrument(
            model, optimizer, job="late", url=address, client=client, probes=False
        )
        for _ in range(LATE_STEPS):
            loss = model(inputs).square().mean()
            time.sleep(rank * LATE_MS / 1e3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.close(10.0)
    waits = client.waits_ms(Op.BACKWARD)[LATE_STEPS // 4 :]
    (Path(folder) / f"waits-{rank}.json").write_text(json.dumps(statistics.median(waits)))
    dist.barrier()


class KeepingClient(Client):
    """Client that also keeps the telemetry that it sends."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._messages: list[bytes] = []

    def send_telemetry(self, job: str, message: bytes, *form: Any, **options: Any) -> Any:
        """Send an encoded batch, and keep it."""
        self._messages.append(message)
        return super().send_telemetry(job, message, *form, **options)

    def waits_ms(self, op: Op) -> Sequence[float]:
        """Waiting times of the passes of a kind, in the order of their steps."""
        batches = [decode(message) for message in self._messages]
        return [ms for batch in batches for ms in batch.wait_ms[batch.op == op].tolist()]
