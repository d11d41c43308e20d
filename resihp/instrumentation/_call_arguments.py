"""Work in a forward pass, from the arguments of the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeGuard

import torch

from resihp.hooks._workload import Features, Form, Snapshot, Work, snapshot_of

Lengths = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Function of a call's arguments that returns the lengths of its sequences."""

_NAMES = {
    "cu_seqlens": Form.CU_SEQLENS,
    "cu_seq_lens_q": Form.CU_SEQLENS,
    "cu_seqlens_q": Form.CU_SEQLENS,
    "cu_seq_lens": Form.CU_SEQLENS,
    "cu_seq_q": Form.CU_SEQLENS,
    "seq_lens": Form.SEQ_LENS,
    "seqlens": Form.SEQ_LENS,
    "lengths": Form.SEQ_LENS,
    "attention_mask": Form.ATTENTION_MASK,
    "position_ids": Form.POSITION_IDS,
    "positions": Form.POSITION_IDS,
}
_MAY_BE_LISTS = (Form.SEQ_LENS, Form.CU_SEQLENS)
_INPUTS = (
    "input_ids", "inputs_embeds", "tokens", "inputs", "x", "src", "idx", "pixel_values",
    "input_values", "input_features",
)  # fmt: skip
_NOT_INPUTS = ("label", "target", "tgt", "mask")
_MOST_ITEMS = 8
"""Items of a list that are looked at; it may hold a number for each of many rows."""


def argument_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module, also of one that is wrapped; none
    where Python does not know them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # of a scripted module
        return ()
    names = tuple(each.name for each in parameters if each.kind in positional)
    inner = getattr(module, "_orig_mod", getattr(module, "module", None))
    if names or not isinstance(inner, torch.nn.Module):
        return names
    return argument_names(inner)  # of `forward(*args, **kwargs)`, as DDP's


def work_of_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lengths: Lengths | None,
    names: Sequence[str] = (),
) -> Work | None:
    """Return the work that the arguments of a forward pass tell; None if they tell none.

    In this order: `lengths`; cumulative lengths; lengths; a mask; positions that restart; the
    shape of the input: rows of tokens if it holds whole numbers, otherwise rows, positions and
    features, or images; a nested tensor's rows have their own lengths. A mask of other than two to
    four dimensions, or nested, counts as absent. A mask or positions of one row count for each row
    of the input. A batch may be a dictionary, tuple, list or dataclass, in any argument.

    names  of the positional arguments, as `argument_names` returns them
    """
    if lengths is not None:
        return snapshot_of(Form.SEQ_LENS, lengths(tuple(args), dict(kwargs)))
    if len(args) == 1 and not kwargs and _is_input(args[0]):
        return _work_of_shape(args[0])  # the common case, and the cheap one
    given = (*args, *kwargs.values())
    if names and args:
        kwargs = {**dict(zip(names, args)), **kwargs}  # noqa: B905 naming `strict` costs as much
    for value in given:
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
            args = (*args, *value[:_MOST_ITEMS])
        elif contents := _by_name(value):
            kwargs = {**contents, **kwargs}
    for name, form in _NAMES.items():
        if name in kwargs and _is_usable(form, value := kwargs[name]):
            work = snapshot_of(form, value)
            if isinstance(work, Snapshot) and _has_one_row(form, value):
                return replace(work, times=_rows_sharing(value, _input(args, kwargs)))
            return work
    tensor = _input(args, kwargs)
    if tensor is None:
        return None
    is_sound = "input_values" in kwargs and kwargs["input_values"] is tensor
    return _rows(*tensor.shape) if is_sound and tensor.ndim == 2 else _work_of_shape(tensor)


def _by_name(value: Any) -> Mapping[str, Any]:
    """Return what a batch holds under names; nothing of what is no batch."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple):
        return value._asdict()  # type: ignore[attr-defined, no-any-return]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {}


def _input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    for name in _INPUTS:
        if name in kwargs and _is_input(value := kwargs[name]):
            return value
    for value in args:
        if _is_input(value):
            return value
    for name, value in kwargs.items():
        if _is_input(value) and not any(word in str(name) for word in _NOT_INPUTS):
            return value
    return None


def _has_one_row(form: Form, value: torch.Tensor) -> bool:
    if form is Form.ATTENTION_MASK:
        return value.shape[0] == 1
    return form is Form.POSITION_IDS and (value.ndim < 2 or value.shape[-2] == 1)


def _rows_sharing(value: torch.Tensor, tensor: torch.Tensor | None) -> int:
    """Return the number of rows of the input that share a mask or positions of one row."""
    if tensor is None or tensor.is_nested:
        return 1
    has_rows = tensor.ndim >= (3 if tensor.is_floating_point() else 2)
    return tensor.shape[0] if has_rows and tensor.shape[1] == value.shape[-1] else 1


def _is_input(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _is_usable(form: Form, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is not None and form in _MAY_BE_LISTS
    if value.is_nested:
        return False
    if form is Form.ATTENTION_MASK:
        return 2 <= value.ndim <= 4
    return not value.is_floating_point() and value.ndim <= 3


def _work_of_shape(tensor: torch.Tensor) -> Work | None:
    if tensor.is_nested:
        return _work_of_nested(tensor)
    return _work_of_size(tensor.shape, tensor.is_floating_point())


@lru_cache(maxsize=1_024)
def _work_of_size(shape: torch.Size, is_floating_point: bool) -> Features:
    if is_floating_point:
        positions = shape[1:-1] if len(shape) < 4 else shape[2:]
        return _rows(shape[0], positions.numel())
    if len(shape) == 1:
        return _rows(1, shape[0])
    if len(shape) > 3:
        return _rows(shape[0], shape[2:].numel())
    return _rows(shape[0], shape[1])


def _rows(rows: int, length: int) -> Features:
    if not rows or not length:
        return Features(0, 0, 0, 0)
    return Features(rows * length, rows, rows * length * length, length)


def _work_of_nested(tensor: Any) -> Work | None:
    if tensor.layout is not torch.jagged:
        return tuple(len(row) for row in tensor.unbind())
    lengths = tensor.lengths()  # None but where there are gaps between the rows
    if lengths is None:
        return snapshot_of(Form.CU_SEQLENS, tensor.offsets())
    return snapshot_of(Form.SEQ_LENS, lengths)
