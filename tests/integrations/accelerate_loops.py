"""Loops of Accelerate on several ranks, with and without quotas, and what each step had.

Run by torchrun; every loop writes FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resihp.elastic import NoPlans
from resihp.integrations.accelerate import QuotaSteps
from tests.integrations.quota_plans import OnePlan

ACCUMULATION, SAMPLES, PASSES = 3, 57, 3
RESUMED = 6
"""Step with which a training goes on that was left before it: in the middle of a pass."""
LIMIT = 2
"""Steps a pass of the loop that leaves each one early."""


def prepare(accelerator: Accelerator, *, shuffle: bool = True) -> tuple[Any, Any, Any]:
    """Model, optimizer and data, alike on all ranks and in all loops."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(SAMPLES, 8), nn.Tanh(), nn.Linear(8, SAMPLES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=2, shuffle=shuffle)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, data)
    return prepared


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), (x * 7 + 1) % SAMPLES)


def undisturbed(accelerator: Accelerator) -> dict[str, Any]:
    """The loop as everybody writes it."""
    model, optimizer, data = prepare(accelerator)
    taken: list[list[int]] = []
    for _ in range(PASSES):
        batches = list(data)
        for first in range(0, len(batches), ACCUMULATION):
            step = batches[first : first + ACCUMULATION]
            for (x,) in step[:-1]:
                with accelerator.no_sync(model):
                    accelerator.backward(loss_of(model, x) / len(step))
            accelerator.backward(loss_of(model, *step[-1]) / len(step))
            taken.append([one for (x,) in step for one in x.tolist()])
            optimizer.step()
            optimizer.zero_grad()
    return {"taken": taken, "model": model.module.state_dict()}


def by_quotas(accelerator: Accelerator, folder: Path, name: str, *quotas: int) -> dict[str, Any]:
    """The loop with quotas; the second one goes on from what the first one saved."""
    first = RESUMED if name == "resumed" else 0
    model, optimizer, data = prepare(accelerator)
    if first:
        saved = torch.load(folder / "saved.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.batch_sampler.batch_sampler.sampler.generator.set_state(saved["data"])
    plans = OnePlan(*quotas)
    options = {"plans": plans, "first": first, "url": "http://127.0.0.1:9"}
    taken: list[list[int]] = []
    counts: list[tuple[int, ...]] = []
    with QuotaSteps(model, optimizer, data, accumulation=ACCUMULATION, **options) as steps:
        of_pass = None
        while steps.done < PASSES * len(steps):
            of_pass = data.batch_sampler.batch_sampler.sampler.generator.get_state()
            for step in steps:
                if not first and step.number == RESUMED and dist.get_rank() == 0:
                    state = {"model": model.module.state_dict(), "data": of_pass}
                    torch.save({**state, "optimizer": optimizer.state_dict()}, folder / "saved.pt")
                taken.append([])
                counts.append(step.quotas)
                for (x,) in step:
                    with step.sync(model):
                        accelerator.backward(loss_of(model, x) * step.scale)
                    taken[-1] += x.tolist()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == first + 1:
                    plans.until_read()
        plans.until_told()
    kept = {"taken": taken, "quotas": counts, "told": plans.told, "first": first}
    return {**kept, "model": model.module.state_dict()}


def left_early(accelerator: Accelerator, first: int = 0, skip: int | None = None) -> dict[str, Any]:
    """The loop with quotas and a limit of steps a pass, on data in order, also a resumed one."""
    model, optimizer, data = prepare(accelerator, shuffle=False)
    taken: list[list[int]] = []
    done: list[tuple[int, int]] = []
    options = {"plans": NoPlans(), "url": "http://127.0.0.1:9", "first": first, "skip": skip}
    with QuotaSteps(model, optimizer, data, accumulation=ACCUMULATION, **options) as steps:
        while steps.done < PASSES * LIMIT:
            assert steps.done_of_pass == (skip or 0) * (not taken)
            for step in islice(steps, LIMIT - steps.done_of_pass):
                taken.append([])
                for (x,) in step:
                    with step.sync(model):
                        accelerator.backward(loss_of(model, x) * step.scale)
                    taken[-1] += x.tolist()
                done.append((steps.done, steps.done_of_pass))
    return {"taken": taken, "done": done}


def failed(accelerator: Accelerator) -> None:
    """A loop that an error ends leaves nobody who asks for plans."""
    steps = QuotaSteps(
        *prepare(accelerator), accumulation=ACCUMULATION, plans=NoPlans(), url="http://127.0.0.1:9"
    )
    with suppress(ValueError), steps:
        next(iter(steps))
        asking = [each for each in threading.enumerate() if each.name == "resihp-quotas"]
        assert len(asking) == (dist.get_rank() == 0)
        raise ValueError("scripted")
    for thread in asking:
        thread.join(60.0)
        assert not thread.is_alive()


def main() -> None:
    """Run all loops."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = dist.get_rank()
    torch.save(undisturbed(accelerator), folder / f"undisturbed-{rank}.pt")
    for name, quotas in ("quotas", (5, 3, 1)), ("resumed", (1, 2, 6)):
        torch.save(by_quotas(accelerator, folder, name, *quotas), folder / f"{name}-{rank}.pt")
        dist.barrier()
    left = left_early(accelerator)
    torch.save(left, folder / f"left-{rank}.pt")
    resumed = left_early(accelerator, *left["done"][LIMIT])
    torch.save(resumed, folder / f"left-resumed-{rank}.pt")
    failed(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
