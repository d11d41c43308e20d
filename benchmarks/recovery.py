"""What the loss of a replica costs a running job: `python -m benchmarks.recovery`.

One job of four replicas loses one by SIGKILL about every 30 steps, in the middle of its share, and
goes on with fewer. It is run with ResiHP's loop, with the same loop rolling the step back, with
torchft (in a temporary environment that borrows this one's torch), and with checkpoint and restart
at the interval of Young and Daly. Everybody keeps the number of microbatches of a step. One
repetition takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import _recovery_engine, _recovery_ours, _recovery_restart
from benchmarks._recovery_job import HOLD_S, MICROBATCHES, PLACES, REPLICAS, STEPS
from benchmarks._report import install, machine, peer_python, print_table, write_json

PEER = "torchft-nightly==2026.10.26"
PEER_NEEDS = ("opentelemetry-exporter-otlp-proto-http>=1.39", "opentelemetry-sdk>=1.39")
_WORKER = Path(__file__).with_name("_recovery_torchft.py")
FREE_S = 30 * HOLD_S * MICROBATCHES / REPLICAS
"""About the time between two faults."""


@dataclass(frozen=True)
class Cost:
    """What one run of the job cost.

    recovery_s  from each kill to the next completed step
    extra_s     the part of it beyond what the survivors need for the rest of the step
    again       microbatches computed more than once, for each kill
    step_ms     of an undisturbed step of all replicas
    goodput     time of as many undisturbed steps of those alive, over the time that it took
    """

    recovery_s: list[float]
    extra_s: list[float]
    again: float
    step_ms: float
    goodput: float


class UnfinishedError(RuntimeError):
    """A run that did not get to its end, or in which not all were killed who should have been."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", action="append", help="contenders whose name begins so")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    options = parser.parse_args()
    contenders: dict[str, Callable[[Path], None]] = {
        "ResiHP": lambda folder: _recovery_ours.play(folder, rolls_back=False),
        "step rolled back": lambda folder: _recovery_ours.play(folder, rolls_back=True),
    }
    with tempfile.TemporaryDirectory(prefix="resihp-peer-") as environment:
        note = f"{PEER}: left out"
        if options.peer:
            try:
                python = peer_python(Path(environment) / "venv")
                install(python, *PEER_NEEDS)
                install(python, "--no-deps", PEER)
                for kind in ("tuned", "documented"):
                    contenders[f"torchft, {kind}"] = _peer(python, kind)
                note = f"{PEER}; tuned: 0.5 s heartbeat, 0.1 s join"
            except (subprocess.SubprocessError, OSError, RuntimeError) as error:
                note = f"torchft could not be measured here: {error}"
        every = _best_interval()
        restart = f"restart, checkpoint every {every}"
        contenders[restart] = lambda folder: _recovery_restart.play(folder, every=every)
        chosen = {
            name: play
            for name, play in contenders.items()
            if not options.only or name.startswith(tuple(options.only))
        }
        runs = _measured(chosen, options.repeats)
        if not options.only:
            _show(runs, restart)
            _show_engine()
    print(f"\n{machine()}\nPeer: {note}")
    if options.json:
        write_json(options.json, {"peer": note, **{k: asdict(v) for k, v in runs.items()}})


def _measured(contenders: dict[str, Callable[[Path], None]], repeats: int) -> dict[str, Cost]:
    """Each contender in turn, as often as asked, so that another load hits all of them."""
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, play in contenders.items():
            with tempfile.TemporaryDirectory(prefix="resihp-recovery-") as folder:
                play(Path(folder))
                try:
                    costs[name].append(_cost(_diaries(Path(folder))))
                except UnfinishedError as error:
                    print(f"{name} left out once: {error}", flush=True)
                    continue
            print(name, costs[name][-1], flush=True)
    return {name: _middle(of_one) for name, of_one in costs.items() if of_one}


def _middle(costs: list[Cost]) -> Cost:
    return Cost(
        [second for cost in costs for second in cost.recovery_s],
        [second for cost in costs for second in cost.extra_s],
        statistics.median(cost.again for cost in costs),
        statistics.median(cost.step_ms for cost in costs),
        statistics.median(cost.goodput for cost in costs),
    )


def _diaries(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("diary-*") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda event: float(event["at"]))


def _cost(events: list[dict[str, Any]]) -> Cost:
    steps = _first_completions(events)
    kills = [event for event in events if event["what"] == "killed"]
    if len(steps) < STEPS or len(kills) < len(PLACES):
        raise UnfinishedError(f"{len(steps)} of {STEPS} steps, {len(kills)} kills")
    computed = sum(event["what"] == "microbatch" for event in events)
    undisturbed = _undisturbed(steps)
    recovery = [steps[kill["step"]] - kill["at"] for kill in kills]
    rest = [_least_rest_s(REPLICAS - i) for i in range(len(kills))]
    least = sum(undisturbed[_alive(step)] for step in range(1, STEPS))
    return Cost(
        recovery,
        [took - needed for took, needed in zip(recovery, rest, strict=True)],
        (computed - STEPS * MICROBATCHES) / len(kills),
        1e3 * undisturbed[REPLICAS],
        least / (steps[STEPS - 1] - steps[0]),
    )


def _undisturbed(steps: dict[int, float]) -> dict[int, float]:
    """Median seconds of the steps without a fault, by the number of replicas alive."""
    taken: dict[int, list[float]] = {}
    for step in range(1, STEPS):
        if step not in PLACES:
            taken.setdefault(_alive(step), []).append(steps[step] - steps[step - 1])
    return {alive: statistics.median(seconds) for alive, seconds in taken.items()}


def _alive(step: int) -> int:
    """Replicas that complete a step."""
    return REPLICAS - sum(step >= place for place in PLACES)


def _step_s(alive: int) -> float:
    return HOLD_S * MICROBATCHES / alive


def _least_rest_s(alive: int) -> float:
    """What the survivors need at least from a kill on: what they have not finished, and the lost
    share, evenly."""
    share = MICROBATCHES // alive
    left = MICROBATCHES - (share // 2) * (alive - 1)
    return HOLD_S * left / (alive - 1)


def _best_interval() -> int:
    """Steps between two checkpoints after Young (1974) and Daly (2006): sqrt(2 C M) apart."""
    with tempfile.TemporaryDirectory(prefix="resihp-recovery-") as folder:
        save_s = _recovery_restart.time_save(Path(folder))
    return max(1, round(math.sqrt(2 * save_s * FREE_S) / _step_s(REPLICAS)))


def _show(runs: dict[str, Cost], restart: str) -> None:
    ours = runs["ResiHP"]
    rows = [
        [
            name,
            *(f"{s:.2f}" for s in (statistics.median(c.recovery_s), statistics.median(c.extra_s))),
            f"{c.again:.1f}",
            f"{c.step_ms:.0f}",
            f"{c.goodput:.3f}",
            f"{ours.goodput / c.goodput:.2f}x",
        ]
        for name, c in runs.items()
    ]
    columns = [
        "",
        "kill to step s",
        "beyond least s",
        "mb again",
        "step ms",
        "goodput",
        "ResiHP better",
    ]
    print_table("SIGKILL of a replica about every 30 steps", columns, rows)
    _show_rates(statistics.median(ours.extra_s), statistics.median(runs[restart].extra_s))


def _show_engine() -> None:
    """The engine's own job, with sums in any order and in a fixed one; once each."""
    rows = []
    for order, deterministic in (("any order", False), ("fixed order", True)):
        with tempfile.TemporaryDirectory(prefix="resihp-recovery-") as folder:
            _recovery_engine.play(Path(folder), deterministic=deterministic)
            rows.append([order, *(f"{cost:.2f}" for cost in _engine_cost(_diaries(Path(folder))))])
    columns = ["sums in", "kill to step s", "in steps of the survivors", "mb again", "step s"]
    print_table("ResiHP's engine, 3 pipelines of 2 stages, one killed in mid-step", columns, rows)


def _engine_cost(events: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    """Recovery in seconds and in steps, microbatches computed again, seconds of a step before."""
    job, steps = _recovery_engine, _first_completions(events)
    killed_at = next(event["at"] for event in events if event["what"] == "killed")
    taken = {step: steps[step] - steps[step - 1] for step in range(1, job.STEPS)}
    before = statistics.median(s for step, s in taken.items() if step < job.AT)
    after = statistics.median(s for step, s in taken.items() if step > job.AT)
    computed = sum(event["what"] == "microbatch" for event in events)
    recovery = steps[job.AT] - killed_at
    return recovery, recovery / after, computed - job.STEPS * job.MICROBATCHES, before


def _first_completions(events: list[dict[str, Any]]) -> dict[int, float]:
    """When each step was completed by the first that did so."""
    steps: dict[int, float] = {}
    for event in events:
        if event["what"] == "step":
            steps.setdefault(event["step"], event["at"])
    return steps


def _show_rates(ours_s: float, restart_s: float) -> None:
    """Goodput at other fault rates, from the measured costs of one fault and one checkpoint."""
    with tempfile.TemporaryDirectory(prefix="resihp-recovery-") as folder:
        save_s = _recovery_restart.time_save(Path(folder))
    rows = []
    for restarts in (0.5, 1, 2, 5, 10):
        between = restarts * restart_s
        kept = 1 / (1 + ours_s / between)
        interval = math.sqrt(2 * save_s * between)
        lost = restart_s + interval / 2
        other = 1 / ((1 + save_s / interval) * (1 + lost / between))
        rows.append([f"{restarts:g}", f"{kept:.3f}", f"{other:.3f}", f"{kept / other:.2f}x"])
    columns = ["MTBF in restarts", "ResiHP", "restart", "ratio"]
    print_table("Goodput by mean time between faults, from the costs above", columns, rows)


def _peer(python: Path, kind: str) -> Callable[[Path], None]:
    """A run of the job with torchft."""

    def play(folder: Path) -> None:
        command = [str(python), str(_WORKER), "lighthouse", kind]
        quiet = {"stderr": subprocess.DEVNULL}
        server = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **quiet)  # type: ignore[call-overload]
        replicas: list[subprocess.Popen[bytes]] = []
        try:
            address = server.stdout.readline().strip()
            for rank in range(REPLICAS):
                worker = [str(python), str(_WORKER), "replica", str(rank), address, str(folder)]
                replicas.append(subprocess.Popen(worker, stdout=subprocess.DEVNULL, **quiet))  # type: ignore[call-overload]
            end = time.monotonic() + 400
            while any(p.poll() is None for p in replicas) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            for process in (*replicas, server):
                process.kill()
                process.wait()

    return play


if __name__ == "__main__":
    main()
