"""What a tool adds to an ordinary loop, measured in a process of its own.

Run as a module, because the peer's interpreter has packages of its own:
`python -m benchmarks._instrument_worker TOOLS ADDRESS SECONDS` prints one JSON object. TOOLS are
names of `TOOLS`, joined by commas.

All code of DDP and FSDP2 runs, and no other process adds to the spread of the times: DDP is the
only rank of gloo, FSDP2, which would leave out its collectives then, is one of two ranks of torch's
backend "fake", whose collectives complete at once.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._hooks_worker import LENGTHS, MICROBATCHES, Repeated, Step, calibrated, difference, timed

Timing = tuple[float, float]
"""Seconds of a step: by the wall, and of the training thread's processor time."""


class Blocks(nn.Module):
    """Blocks one after the other; under FSDP2 each is a unit."""

    def __init__(self, units: int, width: int, repeats: int, device: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Repeated(width, repeats, device) for _ in range(units))

    def forward(self, x: torch.Tensor, seq_lens: list[int] | None = None) -> torch.Tensor:
        """Return `x` after all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


class Loop:
    """A training loop without any tool.

    kind     "plain", "ddp" or "fsdp2"
    repeats  work of each of the `units` blocks
    """

    def __init__(
        self,
        kind: str,
        microbatches: int,
        *,
        units: int = 1,
        width: int = 8,
        repeats: int = 1,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Blocks(units, width, repeats, device)
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.kind, self.microbatches = kind, microbatches
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(width, width, device=device)

    def synchronized(self, index: int) -> Any:
        """Return the block for a microbatch: gradients are reduced in the last one of a step."""
        is_last = index == self.microbatches - 1
        if self.kind == "fsdp2":
            self.model.set_requires_gradient_sync(is_last)
        return self.model.no_sync() if self.kind == "ddp" and not is_last else nullcontext()

    def forward(self) -> Any:
        """Return the loss of one microbatch."""
        return self.model(self.inputs, seq_lens=LENGTHS).square().mean()

    def update(self) -> None:
        """Update the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Run one step."""
        for index in range(self.microbatches):
            with self.synchronized(index):
                loss = self.forward()
                loss.backward()
        self.update()


class NoTool:
    """The loop as it is."""

    def __init__(self, address: str) -> None:
        pass

    def start(self, loop: Loop) -> Step:
        """Return the step under the tool."""
        return loop.step

    def stop(self) -> None:
        """Leave the loop as it was."""

    def close(self) -> dict[str, Any]:
        """Send what is left; return counts of records."""
        return {}


class HooksByHand(NoTool):
    """Blocks of a `Monitor` around every pass and the update."""

    def __init__(self, address: str) -> None:
        import resihp

        self._monitor = resihp.Monitor(job="benchmark", url=address)

    def start(self, loop: Loop) -> Step:
        monitor = self._monitor

        @monitor.step
        def step() -> None:
            for index in range(loop.microbatches):
                with loop.synchronized(index):
                    with monitor.forward(seq_lens=LENGTHS):
                        loss = loop.forward()
                    with monitor.backward():
                        loss.backward()
            with monitor.optimizer():
                loop.update()

        return step

    def close(self) -> dict[str, Any]:
        self._monitor.close()
        stats = self._monitor.stats
        return {"sent": stats.sent, "dropped": stats.dropped, "failures": stats.failures}


class Instrument(NoTool):
    """`resihp.instrument` on the model and its optimizer; `remove` switches it off."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._counts = {"sent": 0, "dropped": 0, "failures": 0}

    def start(self, loop: Loop) -> Step:
        import resihp

        self._monitor = resihp.instrument(
            loop.model, loop.optimizer, job="benchmark", url=self._address
        )
        return loop.step

    def stop(self) -> None:
        self._monitor.remove()
        self._monitor.close()
        stats = self._monitor.stats
        for name in self._counts:
            self._counts[name] += getattr(stats, name)

    def close(self) -> dict[str, Any]:
        return self._counts


class EmptyCallbacks(NoTool):
    """The callbacks of torch that tell the passes of such a loop, with functions that do nothing:
    what a tool cannot add less than, unless the loop calls it."""

    def start(self, loop: Loop) -> Step:
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def nothing(*_: Any) -> None:
            pass

        def gradients_ready() -> None:
            queue(nothing)

        def before_backward(_: Any) -> None:
            queue(gradients_ready)

        model = loop.model

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            output: torch.Tensor = model._call_impl(*args, **kwargs)
            assert output.grad_fn is not None
            output.grad_fn.register_prehook(before_backward)
            return output

        self._model = model
        model._compiled_call_impl = call
        self._handles = [
            loop.optimizer.register_step_pre_hook(nothing),
            loop.optimizer.register_step_post_hook(nothing),
        ]
        return loop.step

    def stop(self) -> None:
        del self._model._compiled_call_impl
        for handle in self._handles:
            handle.remove()


class TraceML(NoTool):
    """The peer's automatic instrumentation, its aggregator running."""

    def __init__(self, address: str) -> None:
        import traceml_ai

        host, port, session, folder = address.split("|")
        self._traceml = traceml_ai
        traceml_ai.init(
            mode="auto", aggregator_host=host, aggregator_port=int(port), session_id=session,
            logs_dir=folder, on_missing_aggregator="raise",
        )  # fmt: skip

    def start(self, loop: Loop) -> Step:
        trace_step = self._traceml.trace_step

        def step() -> None:
            with trace_step(loop.model):
                loop.step()

        return step


TOOLS: dict[str, type[NoTool]] = {
    "none": NoTool, "again": NoTool, "hooks": HooksByHand, "instrument": Instrument,
    "callbacks": EmptyCallbacks, "traceml": TraceML,
}  # fmt: skip


def interleaved(
    loop: Loop, tools: dict[str, NoTool], seconds: float, burst: int
) -> dict[str, list[Timing]]:
    """Return the medians of bursts of steps, by tool, one a round: each round has a burst under
    each tool, in changing order. The first steps of a burst are not counted.
    """
    found: dict[str, list[Timing]] = {name: [] for name in tools}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        order = list(tools)
        shift = len(found["none"]) % len(order)
        for name in order[shift:] + order[:shift]:
            step = tools[name].start(loop)
            for _ in range(1 + burst // 4):
                step()
            times = [timed(step) for _ in range(burst)]
            tools[name].stop()
            wall, cpu = zip(*times, strict=True)
            found[name].append((statistics.median(wall), statistics.median(cpu)))
    return found


def summary(times: dict[str, list[Timing]]) -> dict[str, Any]:
    """Return the time of a step without a tool, and what each tool adds to it; "beyond" is what
    `instrument` adds beyond the hooks by hand. Microseconds."""
    pairs = {name: (name, "none") for name in times if name != "none"}
    if "instrument" in times:
        pairs["beyond"] = ("instrument", "hooks")
    plain = times["none"]
    result: dict[str, Any] = {
        "step_us": statistics.median(wall for wall, _ in plain) * 1e6, "rounds": len(plain)
    }  # fmt: skip
    for name, (one, other) in pairs.items():
        result[name] = {}
        for clock, word in enumerate(("wall", "cpu")):
            added = [a[clock] - b[clock] for a, b in zip(times[one], times[other], strict=True)]
            result[name] |= difference(added, word)
    return result


def wait_us(tool: NoTool, calls: int = 2000, rounds: int = 15) -> float:
    """Return what the tool adds to one wait for other ranks within a forward pass, which FSDP2
    makes up to three times a unit and microbatch: in a tight loop, in microseconds."""
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    work.wait()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.spent_s = 0.0

        def forward(self, x: torch.Tensor, seq_lens: Any = None) -> torch.Tensor:
            begun = time.perf_counter()
            for _ in range(calls):
                work.wait()
            self.spent_s = time.perf_counter() - begun
            return self.weight * x

    loop = Loop("plain", 1)
    loop.model, added = Waits(), []
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-4)
    for _ in range(rounds):
        loop.step()
        plain_s = loop.model.spent_s
        tool.start(loop)()
        added.append(loop.model.spent_s - plain_s)
        tool.stop()
    return float(statistics.median(added)) / calls * 1e6


def _cases(repeats: int) -> dict[str, tuple[Callable[[], Loop], int]]:
    """Loops with the length of a burst; the large ones take about 100 ms a step."""
    large = max(1, repeats // 8)
    return {
        "plain_1": (lambda: Loop("plain", 1), 60),
        "plain_8": (lambda: Loop("plain", MICROBATCHES), 40),
        "ddp_1": (lambda: Loop("ddp", 1), 40),
        "ddp_8": (lambda: Loop("ddp", MICROBATCHES), 30),
        "fsdp2_2": (lambda: Loop("fsdp2", 1, units=2), 20),
        "fsdp2_12": (lambda: Loop("fsdp2", 1, units=12), 10),
        "ddp_large": (lambda: Loop("ddp", MICROBATCHES, width=256, repeats=repeats), 2),
        "fsdp2_large": (
            lambda: Loop("fsdp2", MICROBATCHES, units=8, width=256, repeats=large), 2,
        ),
    }  # fmt: skip


def join(backend: str, ranks: int) -> None:
    if backend == "fake":  # its module registers it
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=ranks)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    names, address, seconds = arguments
    torch.set_num_threads(1)
    repeats = calibrated("cpu").model.repeats
    tools = {name: TOOLS[name](address) for name in names.split(",")}
    result: dict[str, Any] = {"cases": {}}
    for backend, kinds, ranks in (("gloo", ("plain", "ddp"), 1), ("fake", ("fsdp2",), 2)):
        join(backend, ranks)
        for name, (make, burst) in _cases(repeats).items():
            if not name.startswith(kinds):
                continue
            loop = make()
            loop.step()
            share = 0.25 if name.endswith("large") else 0.5 / 6
            times = interleaved(loop, tools, share * float(seconds), burst)
            result["cases"][name] = summary(times)
        if backend == "gloo" and "instrument" in tools:
            result["wait_us"] = wait_us(tools["instrument"])
        del loop
        dist.destroy_process_group()
    result["records"] = {name: counts for name, tool in tools.items() if (counts := tool.close())}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
