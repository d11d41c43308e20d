"""One tool around one training loop, measured in a process of its own.

Run as a file, because the peer's interpreter has the peer's packages and not these:
`python _hooks_worker.py TOOL ADDRESS SECONDS DEVICE` prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

MICROBATCHES = 8
LENGTHS = [37, 512, 16, 4, 1024, 130, 64, 261]
REST_S = 0.002  # after each tiny step, lest a tool's queue overflows as it never would in training
Step = Callable[[], None]


class Repeated(torch.nn.Module):
    """One matrix, applied over and over: one module call a microbatch, as in a real model."""

    def __init__(self, width: int, repeats: int, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(width, device=device))
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Work in proportion to `repeats`."""
        for _ in range(self.repeats):
            x = torch.nn.functional.linear(x, self.weight)
        return x


class Training:
    """A small model; `repeats` sets how much work a microbatch is."""

    def __init__(self, width: int, repeats: int, microbatches: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = Repeated(width, repeats, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(width, width, device=device)
        self.microbatches = microbatches

    def forward(self) -> Any:
        """The loss of one microbatch."""
        return self.model(self.inputs).square().mean()

    def update(self) -> None:
        """The optimizer's part."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """One step without any tool."""
        for _ in range(self.microbatches):
            loss = self.forward()
            loss.backward()
        self.update()


class _Stopwatch:
    """Times the making, entering and leaving of a block, not what is in it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        start = time.perf_counter()
        self._block = make()
        self._block.__enter__()
        self.spent_s = time.perf_counter() - start

    def __enter__(self) -> _Stopwatch:
        return self

    def __exit__(self, *error: object) -> None:
        start = time.perf_counter()
        self._block.__exit__(*error)
        self.spent_s += time.perf_counter() - start


class ResiHP:
    """Every pass recorded, and the optimizer; records go to a real HTTP server."""

    def __init__(self, address: str) -> None:
        import resihp

        self.monitor = resihp.Monitor(job="benchmark", url=address)

    def around(self, training: Training) -> Step:
        """The same step under the tool."""
        monitor = self.monitor

        @monitor.step
        def step() -> None:
            for _ in range(training.microbatches):
                with monitor.forward(seq_lens=LENGTHS):
                    loss = training.forward()
                with monitor.backward():
                    loss.backward()
            with monitor.optimizer():
                training.update()

        return step

    def in_place(self, training: Training, steps: int = 60) -> float:
        """Median time a step within the hooks, in microseconds, with caches as cold as they get."""
        spent: list[float] = []
        for _ in range(steps):
            with _Stopwatch(self.monitor.step) as whole:
                watches = [whole]
                for _ in range(training.microbatches):
                    with _Stopwatch(lambda: self.monitor.forward(seq_lens=LENGTHS)) as watch:
                        loss = training.forward()
                    watches.append(watch)
                    with _Stopwatch(self.monitor.backward) as watch:
                        loss.backward()
                    watches.append(watch)
                with _Stopwatch(self.monitor.optimizer) as watch:
                    training.update()
            watches.append(watch)
            spent.append(sum(watch.spent_s for watch in watches))
        return statistics.median(spent) * 1e6

    def alone(self) -> dict[str, float]:
        """Cost of a record and of a step with nothing in them, in microseconds."""
        monitor = self.monitor

        def microbatch() -> None:
            with monitor.microbatch(seq_lens=LENGTHS):
                pass

        def step() -> None:
            with monitor.step():
                monitor.record(op=5, compute_ms=1.0)  # type: ignore[arg-type]

        def record() -> None:
            monitor.record(op=0, step=1, microbatch=2, compute_ms=1.0, wait_ms=0.5, tokens=8)  # type: ignore[arg-type]

        timed = {"microbatch_us": microbatch, "record_us": record, "step_us": step}
        return {name: _alone(function) for name, function in timed.items()}

    def close(self) -> dict[str, Any]:
        """What became of the records."""
        self.monitor.close()
        stats = self.monitor.stats
        return {"sent": stats.sent, "dropped": stats.dropped, "failures": stats.failures}


class TraceML:
    """Its automatic instrumentation, its aggregator running."""

    def __init__(self, address: str) -> None:
        import traceml_ai

        host, port, session, folder = address.split("|")
        self.traceml = traceml_ai
        traceml_ai.init(
            mode="auto", aggregator_host=host, aggregator_port=int(port), session_id=session,
            logs_dir=folder, on_missing_aggregator="raise",
        )  # fmt: skip

    def around(self, training: Training) -> Step:
        """The same step under the tool."""
        trace_step, model, plain = self.traceml.trace_step, training.model, training.step

        def step() -> None:
            with trace_step(model):
                plain()

        return step

    def alone(self) -> dict[str, float]:
        """Cost of a step with nothing in it, in microseconds."""
        trace_step, model = self.traceml.trace_step, torch.nn.Linear(1, 1)

        def step() -> None:
            with trace_step(model):
                pass

        return {"step_us": _alone(step)}

    def close(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}


def _alone(function: Step, rounds: int = 21, calls: int = 100) -> float:
    """Median over rounds, because other processes share the machine; microseconds a call."""
    times = []
    for _ in range(rounds):
        time.sleep(calls * REST_S)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e6


def interleaved(plain: Step, tool: Step, seconds: float, burst: int) -> dict[str, float]:
    """Added time a step, in microseconds, from pairs of neighbouring steps in changing order:
    by the wall, and as processor time of the training thread. Bursts of pairs, rests between.
    """
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(burst):
            first, second = (plain, tool) if len(pairs) % 2 else (tool, plain)
            one, other = timed(first), timed(second)
            pairs.append((one, other) if first is plain else (other, one))
        if burst > 1:
            time.sleep(burst * REST_S)
    result = {"step_us": statistics.median(plain[0] for plain, _ in pairs) * 1e6}
    for clock, name in enumerate(("wall", "cpu")):
        result |= difference([tool[clock] - plain[clock] for plain, tool in pairs], name)
    return {**result, "pairs": len(pairs)}


def difference(differences: list[float], name: str) -> dict[str, float]:
    """Median and its 95% interval by ranks."""
    ranked, half = sorted(differences), 0.98 * len(differences) ** 0.5
    low = ranked[max(0, int(len(ranked) / 2 - half))]
    high = ranked[min(len(ranked) - 1, int(len(ranked) / 2 + half))]
    return {
        f"{name}_us": statistics.median(differences) * 1e6,
        f"{name}_low_us": low * 1e6,
        f"{name}_high_us": high * 1e6,
    }


def timed(step: Step) -> tuple[float, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    step()
    return time.perf_counter() - wall, time.thread_time() - cpu


def calibrated(device: str, target_s: float = 0.1) -> Training:
    """A training whose step takes about `target_s`."""
    repeats = 1
    while True:
        training = Training(256, repeats, MICROBATCHES, device)
        training.step()
        took_s = statistics.median(_work_s(training, device) for _ in range(3))
        if took_s > 0.8 * target_s:
            return Training(256, max(1, round(repeats * target_s / took_s)), MICROBATCHES, device)
        repeats *= 2


def _work_s(training: Training, device: str) -> float:
    """On the CPU the thread's own time, whatever else the machine does meanwhile."""
    now = time.thread_time if device == "cpu" else time.perf_counter
    start = now()
    training.step()
    if device != "cpu":
        torch.cuda.synchronize()
    return now() - start


def background_us(tool: Any, seconds: float = 3.0) -> float:
    """CPU time of all other threads per tiny step of one microbatch, in microseconds."""
    step, steps, end = tool.around(Training(8, 1, 1, "cpu")), 0, time.perf_counter() + seconds
    cpu, own = time.process_time(), time.thread_time()
    while time.perf_counter() < end:
        step()
        steps += 1
        time.sleep(REST_S)
    time.sleep(1.0)
    return (time.process_time() - cpu - (time.thread_time() - own)) / steps * 1e6


def main() -> None:
    """Measure and print."""
    tool_name, address, seconds, device = sys.argv[1:]
    torch.set_num_threads(1)
    large = calibrated(device)
    tool = ResiHP(address) if tool_name == "resihp" else TraceML(address)
    result: dict[str, Any] = {}
    for name, training, burst in (
        ("tiny_1", Training(8, 1, 1, device), 40),
        ("tiny_8", Training(8, 1, MICROBATCHES, device), 20),
        ("large", large, 1),
    ):
        step = tool.around(training)
        training.step()
        step()
        share = 0.5 if name == "large" else 0.15
        result[name] = interleaved(training.step, step, share * float(seconds), burst)
    result["itself"] = interleaved(large.step, large.step, 0.2 * float(seconds), 1)
    if isinstance(tool, ResiHP):
        result["in_place_us"] = tool.in_place(large)
    result["background_us"] = background_us(tool)
    result["alone"] = tool.alone()
    result["records"] = tool.close()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
