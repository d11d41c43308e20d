"""Work in a forward pass, from the arguments of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

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
_INPUTS = ("input_ids", "inputs_embeds", "tokens", "inputs", "x")


def work_of_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], lengths: Lengths | None
) -> Work | None:
    """Return the work that the arguments of a forward pass tell; None if they tell none.

    In this order: `lengths`; cumulative lengths; lengths; a mask; positions that restart; the
    shape of the input: rows of tokens if it holds whole numbers, otherwise rows, positions and
    features; a nested tensor's rows have their own lengths. A mask of other than two to four
    dimensions, or nested, counts as absent. A mask or positions of one row count for each row of
    the input.
    """
    if lengths is not None:
        return snapshot_of(Form.SEQ_LENS, lengths(tuple(args), dict(kwargs)))
    first = args[0] if len(args) == 1 else None
    if not isinstance(first, torch.Tensor) and isinstance(first, Mapping):
        kwargs = {**first, **kwargs}  # a batch as one dictionary
    if not _NAMES.keys().isdisjoint(kwargs):
        for name, form in _NAMES.items():
            value = kwargs.get(name)
            if value is not None and _is_usable(form, value):
                work = snapshot_of(form, value)
                times = _rows_sharing(form, value, _input(args, kwargs))
                return replace(work, times=times) if isinstance(work, Snapshot) else work
    tensor = _input(args, kwargs)
    return None if tensor is None else _work_of_shape(tensor)


def _input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    named = (kwargs[name] for name in _INPUTS if name in kwargs)
    return next((value for value in chain(named, args) if _is_input(value)), None)


def _rows_sharing(form: Form, value: Any, tensor: torch.Tensor | None) -> int:
    """Return the number of rows of the input that share a mask or positions of one row."""
    if form is Form.ATTENTION_MASK:
        rows = value.shape[0]
    elif form is Form.POSITION_IDS:
        rows = value.shape[-2] if value.ndim > 1 else 1
    else:
        return 1
    if rows != 1 or tensor is None or tensor.is_nested:
        return 1
    has_rows = tensor.ndim >= (3 if tensor.is_floating_point() else 2)
    return tensor.shape[0] if has_rows and tensor.shape[1] == value.shape[-1] else 1


def _is_input(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _is_usable(form: Form, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return form in (Form.SEQ_LENS, Form.CU_SEQLENS)
    if value.is_nested:
        return False
    if form is Form.ATTENTION_MASK:
        return 2 <= value.ndim <= 4
    return not value.is_floating_point() and value.ndim <= 3


def _work_of_shape(tensor: torch.Tensor) -> Work | None:
    if tensor.is_nested:
        return _work_of_nested(tensor)
    shape = tensor.shape
    if tensor.is_floating_point():
        positions = shape[1:-1] if len(shape) < 4 else shape[2:]
        return _rows(shape[0], positions.numel())
    if len(shape) == 1:
        return _rows(1, shape[0])
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
