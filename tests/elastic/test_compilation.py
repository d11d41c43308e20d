"""Parts of layers are compiled once, whatever the lengths and shares, and compute the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from resihp.contracts import ContractError, Plan, Schedule, even_quotas
from resihp.elastic.models import Packed
from resihp.elastic.step import Setup
from tests.elastic.engine_job import ALONE, GRID, MICROBATCHES, UNEVEN
from tests.elastic.test_models import MODELS, OPTIMIZER, batch
from tests.elastic.threads import train

STEPS = 2

# torch's own compiler looks at the gradients of its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Number of graphs that were compiled."""
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def longer(step: int, index: int) -> Packed:
    """Microbatches of other lengths than `batch`."""
    one = batch(step, index)
    tokens, targets = (x.repeat(2) for x in (one.tokens, one.targets))
    return Packed(tokens, targets, (5, len(tokens) - 5))


@pytest.mark.parametrize("kind", ["llama with options", "gpt2", "mixture"])
def test_compiled_parts_compute_what_eager_ones_do(kind: str) -> None:
    plan = Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,))
    alone, compiled = (
        train(Setup(MODELS[kind], OPTIMIZER, batch, compile_backend=backend), plan, STEPS)
        for backend in (None, "aot_eager")
    )
    assert graphs() > 0
    assert compiled.losses == pytest.approx(alone.losses, abs=1e-5)
    assert compiled.norms == pytest.approx(alone.norms, rel=1e-4)


def test_other_lengths_compile_nothing() -> None:
    plan = Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,))
    train(Setup(MODELS["llama"], OPTIMIZER, batch, compile_backend="eager"), plan, STEPS)
    before = graphs()
    train(Setup(MODELS["llama"], OPTIMIZER, longer, compile_backend="eager"), plan, STEPS)
    assert graphs() <= before + 1, "one for a length that happened to equal another dimension"


@pytest.mark.parametrize("layout", [GRID, UNEVEN])
def test_every_layout_trains_alike(layout: Any) -> None:
    plans = [
        Plan(version=0, layout=one, quotas=even_quotas(MICROBATCHES, one.dp))
        for one in (ALONE, layout)
    ]
    alone = train(Setup(MODELS["llama"], OPTIMIZER, batch), plans[0], STEPS)
    setup = Setup(MODELS["llama"], OPTIMIZER, batch, compile_backend="eager")
    assert train(setup, plans[1], STEPS).losses == pytest.approx(alone.losses, abs=2e-5)


def test_passes_in_halves_are_not_compiled() -> None:
    quotas = even_quotas(MICROBATCHES, GRID.dp)
    plan = Plan(version=0, layout=GRID, quotas=quotas, schedule=Schedule.ZERO_BUBBLE)
    train(Setup(MODELS["llama"], OPTIMIZER, batch, compile_backend="eager"), plan, 1)
    assert graphs() == 0


def test_without_it_the_compiler_is_not_even_imported() -> None:
    script = (
        "import sys, torch, resihp.elastic.models.llama as llama\n"
        "llama.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"compile_backend": "nothing"}, "inductor"),
        ({"compile_backend": "eager", "recompute": "layers"}, "recompute"),
    ],
)
def test_what_cannot_be_compiled_is_refused(setting: dict[str, Any], why: str) -> None:
    with pytest.raises(ContractError, match=why):
        Setup(MODELS["llama"], OPTIMIZER, batch, **setting)
