"""Model folders in Hugging Face's format: config.json and safetensors files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from resihp.contracts import ContractError, Layout, Replica, Stage
from resihp.layout import Param, Range, holdings, writers

from ..gpt2 import Gpt2
from ..llama import Llama
from .configuration import config_of, model_of
from .tensor_files import (
    DTYPES,
    INDEX,
    NewFile,
    StoredTensor,
    TensorFiles,
    create,
    plan_files,
    read_object,
    write,
)
from .tensor_names import Slots, slots_of

_UNFINISHED = ".unfinished"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files of tensors in this format."""


class PretrainedFolder:
    """Initial values of a model's parameters, read from the files of a folder by range.

    config  as read, with the changes that were asked for
    files   of the folder; count the bytes that are read
    """

    def __init__(self, config: dict[str, Any], files: TensorFiles, slots: Slots) -> None:
        self.config, self.files, self._slots = config, files, slots

    def initial(self, param: Param, rows: Range) -> torch.Tensor:
        """Return these rows of a parameter, float32."""
        shape = list(param.shape)
        shape[param.dim or 0] = rows[1] - rows[0]
        values = torch.empty(shape, device="cpu")
        for slot in self._slots[param]:
            slot.part(values).copy_(self.files.read(slot.name, slot.region(param, rows)))
        return values


def from_pretrained(
    folder: str | Path, changes: Mapping[str, Any] | None = None, *, seed: int = 0
) -> Llama | Gpt2:
    """Return the model of a folder: Llama 2 or 3, Mistral, Qwen2, Qwen2.5, Qwen3, Mixtral, GPT-2.

    folder   holds config.json and model.safetensors, or several files and their index
    changes  keys of the configuration with other values, e.g. `{"attn_pdrop": 0.0}`; None: the key
             is ignored
    seed     of dropout

    Every rank calls this; no tensor is read before the runtime builds the rank's shard, and then
    only the ranges that it holds. Parameters are float32, whatever the files hold. Raises
    `ContractError` with the key and value of a configuration that is not supported, and with the
    name of a tensor that is missing, unknown or of another shape.
    """
    folder = Path(folder)
    config = _read_config(folder) | dict(changes or {})
    model = model_of(config, seed=seed)
    files = TensorFiles(folder, partial(_is_inert, is_tied=model.shape.tied_embeddings))
    slots = _found_slots(slots_of(model), files)
    _check_names(slots, files)
    model.pretrained = PretrainedFolder(config, files, slots)
    return model


def save_pretrained(
    model: Llama | Gpt2,
    tensors: Mapping[Param, torch.Tensor],
    folder: str | Path,
    *,
    layout: Layout | None = None,
    rank: int = 0,
    step: int = 0,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = 5_000_000_000,
) -> bool:
    """Write the tensors of this rank into a folder that `transformers` can load.

    tensors  of this rank, e.g. `Trainer.tensors`
    layout   of all ranks; None: this rank holds every parameter as a whole
    step     number of updates made; equal on all ranks
    dtype    of the files

    Every rank of the layout calls this with the same arguments but its own tensors and rank; they
    share the folder, and do not communicate. Each range is written by one rank; the last that ends
    puts the files in place, config.json last. Returns True on ranks that find the folder complete.
    Raises `ContractError` for tensors that are not those of this rank in the layout, a model that
    the format cannot describe, and a `dtype` that it lacks, before anything is written.
    """
    folder, layout = Path(folder), layout or _whole(model)
    if rank not in layout.ranks:
        return False
    if dtype not in DTYPES.values():
        raise ContractError("dtype", f"must be one of floats, not {dtype}")
    _check_held(model, tensors, layout, rank)
    pretrained = model.pretrained
    config = pretrained.config if isinstance(pretrained, PretrainedFolder) else config_of(model)
    config = {key: value for key, value in config.items() if key != "dtype"}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    slots = slots_of(model)
    shapes = {slot.name: slot.shape for held in slots.values() for slot in held}
    unfinished = folder / _UNFINISHED
    unfinished.mkdir(parents=True, exist_ok=True)
    files, places = plan_files(shapes, dtype, unfinished, max_file_bytes)
    save = f"{layout}/{step}/{dtype}/{max_file_bytes}/{sorted(shapes)}"
    marks = {one: unfinished / f"{_digest(save)}-{one}" for one in layout.ranks}
    marks[rank].unlink(missing_ok=True)
    for file in files:
        create(file, unfinished)
    _write_ranges(model, tensors, layout, rank, slots, places)
    marks[rank].touch()
    if not all(mark.exists() for mark in marks.values()):
        return _is_complete(folder)
    _put_in_place(folder, config, files, places, rank)
    return True


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ContractError(str(folder), "has no config.json")
    return read_object(path)


def _found_slots(slots: Slots, files: TensorFiles) -> Slots:
    """Return the slots under the names in the files: those of a bare body have no prefix."""

    def found(name: str) -> str:
        bare = name.partition(".")[2]
        return bare if name not in files.tensors and bare in files.tensors else name

    return {
        param: tuple(replace(slot, name=found(slot.name)) for slot in held)
        for param, held in slots.items()
    }


def _check_names(slots: Slots, files: TensorFiles) -> None:
    """Check that the files hold the model's tensors and no others."""
    due = {slot.name: slot.shape for held in slots.values() for slot in held}
    for name, shape in due.items():
        if name not in files.tensors:
            raise ContractError(name, "is in none of the files")
        if files.tensors[name].shape != shape:
            held = list(files.tensors[name].shape)
            raise ContractError(name, f"has shape {held}; the configuration says {list(shape)}")
    for name in files.tensors:
        if name not in due:
            raise ContractError(name, "is in the files, but not in the model")


def _is_inert(name: str, *, is_tied: bool) -> bool:
    """Return whether a tensor follows from others: masks, frequencies, the head of tied models."""
    if name == "lm_head.weight":
        return is_tied
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _whole(model: Llama | Gpt2) -> Layout:
    layers = model.shape.layers
    return Layout((Replica((Stage((0,), (0, layers), (1,)),)),))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _check_held(
    model: Llama | Gpt2, tensors: Mapping[Param, torch.Tensor], layout: Layout, rank: int
) -> None:
    """Check that the tensors are those that this rank holds in the layout, by their shapes."""
    for param, (start, stop) in holdings(layout, model.parameters)[rank].items():
        if param not in tensors:
            raise ContractError(param.key, f"is missing: rank {rank} holds it in the layout")
        due, found = list(param.shape), list(tensors[param].shape)
        due[param.dim or 0] = stop - start
        if found != due:
            raise ContractError(
                param.key, f"has shape {found}; in the layout rank {rank} holds {due} of it"
            )


def _write_ranges(
    model: Llama | Gpt2,
    tensors: Mapping[Param, torch.Tensor],
    layout: Layout,
    rank: int,
    slots: Slots,
    places: Mapping[str, StoredTensor],
) -> None:
    """Write the ranges of which this rank is the writer."""
    held = holdings(layout, model.parameters)[rank]
    for param, rows in writers(layout, model.parameters)[rank]:
        first = held[param][0]
        own = tensors[param].detach().narrow(param.dim or 0, rows[0] - first, rows[1] - rows[0])
        for slot in slots[param]:
            write(places[slot.name], slot.region(param, rows), slot.part(own))


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").exists() and not (folder / _UNFINISHED).exists()


def _put_in_place(
    folder: Path,
    config: Mapping[str, Any],
    files: list[NewFile],
    places: Mapping[str, StoredTensor],
    rank: int,
) -> None:
    """Move the finished files into the folder; several ranks may do it at once."""
    names = {file.name for file in files}
    unfinished = folder / _UNFINISHED
    if (unfinished / files[0].name).exists():  # not for a rank that comes second
        (folder / "config.json").unlink(missing_ok=True)
    for old in folder.iterdir():
        if old.name not in names and (_WRITTEN.fullmatch(old.name) or old.name == INDEX):
            old.unlink(missing_ok=True)
    for file in files:
        with suppress(FileNotFoundError):
            (unfinished / file.name).replace(folder / file.name)
    if len(files) > 1:
        total = sum(file.length - len(file.header) for file in files)
        located = {name: stored.path.name for name, stored in places.items()}
        _write_json(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": located}, rank
        )
    _write_json(folder / "config.json", config, rank)
    shutil.rmtree(unfinished, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any], rank: int) -> None:
    temporary = path.with_name(f".{path.name}.{rank}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)
