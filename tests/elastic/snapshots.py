"""What the ranks of a job hold, written by each of them and put together again."""

from __future__ import annotations

import pickle
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from resihp.elastic.step import Cursor
from resihp.elastic.trainer import Trainer
from tests.elastic.threads import held_by


def save(trainer: Trainer, path: Path, *, whole: bool = True) -> None:
    """Write what this rank holds: parameters, moments, and whole gradients if there are any.

    `whole`: parameters too of which other ranks hold the moments.

    The file is there when it is whole: the rank may be killed while it writes. It holds arrays:
    `torch.save` takes ten times as long for so many small tensors, and so does reading them.
    """
    if trainer.engine is None:
        return
    shard, total = trainer.engine.shard, trainer.engine.total

    # Scalars and the cursor stand beside the parameters, as tensors that every rank holds whole;
    # of scalars, the groups of which it has any rows.
    alike: dict[str, torch.Tensor] = {}
    if isinstance(trainer.setup.data, Cursor):
        alike |= _tensors(trainer.setup.data.state_dict())
    held: dict[str, list[Any]] = defaultdict(list)
    for param, span, tensors in held_by(shard):
        if (param, span) not in shard.slices and not whole:
            continue
        sums = [total[param, span]] if total is not None and (param, span) in total else []
        arrays = [t.numpy() for t in (*tensors, *sums)]
        held[param.key].append((param.shape, param.dim or 0, span[0], arrays))
    table = shard.scalars()
    for row, line in enumerate(table):
        if not line.isinf().any():
            held["scalars"].append((table.shape, 0, row, [line[None].numpy()]))
    step = {"completed": torch.tensor(float(trainer.completed))}
    for key, tensor in (alike | step).items():
        line = tensor.double().flatten()
        held[key].append((line.shape, 0, 0, [line.numpy()]))
    path.with_suffix(".part").write_bytes(pickle.dumps(held))
    path.with_suffix(".part").rename(path)


def load(path: Path) -> dict[str, Any]:
    """Read what a rank has written; see `save`."""
    return {
        key: [
            (shape, dim, start, [torch.from_numpy(array) for array in arrays])
            for shape, dim, start, arrays in held
        ]
        for key, held in pickle.loads(path.read_bytes()).items()
    }


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"cursor.{key}": torch.as_tensor(value, dtype=torch.float64)
        for key, value in state.items()
        if isinstance(value, torch.Tensor | int | float)
    }


def full_state(folder: Path, prefix: str) -> dict[str, list[torch.Tensor]]:
    """The whole state from what each rank has written; see `save`."""
    return assemble([load(path) for path in sorted(folder.glob(f"{prefix}-*.pt"))])


def assemble(shards: list[dict[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """The whole state from the shards of all ranks; what several hold must be equal."""
    full: dict[str, list[torch.Tensor]] = {}
    for key, held in chain.from_iterable(shard.items() for shard in shards):
        for shape, dim, start, tensors in held:
            whole = full.setdefault(key, [])
            whole += [t.new_full(shape, torch.nan) for t in tensors[len(whole) :]]
            for target, tensor in zip(whole, tensors, strict=False):
                view = target.narrow(dim, start, tensor.shape[dim])
                known = ~view.isnan()
                assert torch.equal(view[known], tensor[known]), f"holders of {key} differ"
                view.copy_(tensor)
    for key, tensors in full.items():
        assert not any(t.isnan().any() for t in tensors), f"{key} is not whole"
    return full
