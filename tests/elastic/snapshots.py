"""What the ranks of a job hold, written by each of them and put together again."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from resihp.elastic.step import Cursor
from resihp.elastic.trainer import Trainer
from resihp.layout import Param


def save(trainer: Trainer, path: Path) -> None:
    """Write what this rank holds: parameters, moments, and whole gradients if there are any.

    The file is there when it is whole: the rank may be killed while it writes. It holds arrays:
    `torch.save` takes ten times as long for so many small tensors, and so does reading them.
    """
    if trainer.engine is None:
        return
    shard, total = trainer.engine.shard, trainer.engine.total

    def tensors(param: Param) -> list[torch.Tensor]:
        return [*shard.state(param), *([total[param]] if total is not None else [])]

    # Scalars and the cursor stand beside the parameters, as tensors that every rank holds whole.
    alike = {"scalars": shard.scalars()}
    if isinstance(trainer.setup.data, Cursor):
        alike |= _tensors(trainer.setup.data.state_dict())
    held = {
        param.key: (param.shape, param.dim or 0, span[0], [t.numpy() for t in tensors(param)])
        for param, span in shard.ranges.items()
    }
    step = {"completed": torch.tensor(float(trainer.completed))}
    for key, tensor in (alike | step).items():
        line = tensor.double().flatten()
        held[key] = (line.shape, 0, 0, [line.numpy()])
    path.with_suffix(".part").write_bytes(pickle.dumps(held))
    path.with_suffix(".part").rename(path)


def load(path: Path) -> dict[str, Any]:
    """Read what a rank has written; see `save`."""
    return {
        key: (shape, dim, start, [torch.from_numpy(array) for array in arrays])
        for key, (shape, dim, start, arrays) in pickle.loads(path.read_bytes()).items()
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
    for shard in shards:
        for key, (shape, dim, start, tensors) in shard.items():
            whole = full.setdefault(key, [t.new_full(shape, torch.nan) for t in tensors])
            for target, tensor in zip(whole, tensors, strict=True):
                view = target.narrow(dim, start, tensor.shape[dim])
                held = ~view.isnan()
                assert torch.equal(view[held], tensor[held]), f"holders of {key} differ"
                view.copy_(tensor)
    for key, tensors in full.items():
        assert not any(t.isnan().any() for t in tensors), f"{key} is not whole"
    return full
