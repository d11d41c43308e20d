"""Tensors of a device that travel through the host, with stand-ins for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resihp.contracts import Layout, Plan, Schedule, even_quotas
from resihp.elastic.process_groups import staged
from resihp.elastic.process_groups.staged import DeviceCopies, StagedGlooCommunicators
from resihp.elastic.step import Setup
from tests.elastic.late_copies import LateCommunicators, LateCopies
from tests.elastic.test_models import (
    ALONE,
    LAYOUTS,
    MICROBATCHES,
    MODELS,
    OPTIMIZER,
    STEPS,
    batch,
)
from tests.elastic.threads import Run, cut_small_blocks, train


def trained(layout: Layout, maker: type[StagedGlooCommunicators] | None, **options: Any) -> Run:
    quotas = even_quotas(MICROBATCHES, layout.dp)
    plan = Plan(version=0, layout=layout, quotas=quotas, schedule=Schedule.ZERO_BUBBLE)
    return train(Setup(MODELS["llama"], OPTIMIZER, batch, **options), plan, STEPS, maker=maker)


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"optimizer_replicas": 1, "bucket_bytes": 4096}],
    ids=["plain", "deterministic", "sharded"],
)
@pytest.mark.parametrize("layout", ["grid", "uneven"])
def test_a_job_trains_alike_however_late_its_copies_are(
    layout: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_blocks(monkeypatch)
    late = trained(LAYOUTS[layout], LateCommunicators, **options)
    alone = trained(ALONE, None)
    assert late.losses == pytest.approx(alone.losses, abs=2e-5)
    assert late.norms == pytest.approx(alone.norms, rel=1e-4)


class Hasty(LateCommunicators):
    """Says that a work has ended before its results are there, which is a mistake."""

    def is_done(self, work: object) -> bool:
        return True


class Careless(LateCopies):
    """Has the host read what it has not waited for, which is a mistake."""

    def to_host(self, tensor: torch.Tensor, host: torch.Tensor, after: object) -> object:  # type: ignore[override]
        super().to_host(tensor, host, after)  # type: ignore[arg-type]
        return self.begin()


class CarelessCommunicators(LateCommunicators):
    def _copies(self) -> DeviceCopies:
        return Careless()


@pytest.mark.parametrize("mistake", [Hasty, CarelessCommunicators])
def test_the_stand_in_shows_mistakes(mistake: type[StagedGlooCommunicators]) -> None:
    try:
        found = trained(LAYOUTS["grid"], mistake).losses
    except Exception:  # noqa: BLE001 - values that make no sense may break anything
        return
    assert found != pytest.approx(trained(ALONE, None).losses, abs=2e-5)


class Stream:
    """Notes what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def record_event(self, event: str = "event") -> str:
        return f"{event} of {self._name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")

    def __enter__(self) -> None:
        self._log.append(f"{self._name}: copy")

    def __exit__(self, *error: object) -> None:
        pass


def test_copies_come_after_the_passes_and_the_passes_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is filled may have been the memory of another tensor before: its copy waits too."""
    log: list[str] = []
    streams = iter([Stream("out", log), Stream("into", log)])
    monkeypatch.setattr(staged, "side_stream", lambda device, purpose: next(streams))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: "blocking" if blocking else "event")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("training", log))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"held for {stream._name}")
    )
    copies = DeviceCopies(torch.device("cuda", 0))
    tensor, host = torch.ones(2), torch.zeros(2)
    begun = copies.begin()
    assert copies.to_host(tensor, host, begun) == "blocking of out"
    copies.follow(copies.to_device(host, tensor, begun))
    assert host.tolist() == [1.0, 1.0]
    assert log == [
        "out waits for event of training", "out: copy", "held for out",
        "into waits for event of training", "into: copy", "held for into",
        "training waits for blocking of into",
    ]  # fmt: skip
