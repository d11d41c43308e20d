"""Work in a microbatch, from sequence lengths or an attention mask.

The training thread only takes a snapshot, which never waits for a device; the sums are computed
later by the sender's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError


class Form(Enum):
    """Form in which the lengths are given."""

    SEQ_LENS = "seq_lens"
    CU_SEQLENS = "cu_seqlens"
    ATTENTION_MASK = "attention_mask"
    POSITION_IDS = "position_ids"


class Features(NamedTuple):
    """Values of the four work columns; -1 where not known."""

    tokens: int = -1
    sequences: int = -1
    sum_sq_len: int = -1
    max_len: int = -1


@dataclass(frozen=True)
class Snapshot:
    """A copy of lengths, possibly still in transfer from a device.

    arrived  event after which `values` may be read; None if at once
    times    how often they count: once for each row that shares them
    """

    form: Form
    values: Any
    arrived: Any = None
    times: int = 1

    def ready(self) -> bool:
        """Return whether the values may be read."""
        return self.arrived is None or bool(self.arrived.query())


Work = tuple[int, ...] | Snapshot | Features
"""Sequence lengths, a snapshot from which they are computed, or what is computed from them."""


def snapshot(seq_lens: Any, cu_seqlens: Any, attention_mask: Any) -> Work | None:
    """Copy the one that is given, so that the trainer may reuse its buffer at once. None while a
    CUDA graph is being captured, which would include the copy."""
    if type(seq_lens) is list and cu_seqlens is None and attention_mask is None:
        return tuple(seq_lens)  # the common case, and the cheap one
    given = [
        (form, value)
        for form, value in zip(Form, (seq_lens, cu_seqlens, attention_mask), strict=False)
        if value is not None
    ]
    if len(given) > 1:
        names = ", ".join(form.value for form, _ in given)
        raise ContractError(names, "only one of them may be given")
    return snapshot_of(*given[0])


def snapshot_of(form: Form, value: Any) -> Work | None:
    """Copy lengths given in one form, as `snapshot` does."""
    if form is Form.SEQ_LENS and isinstance(value, (list, tuple, range)):
        return tuple(value)
    if hasattr(value, "is_cuda"):
        return _of_tensor(form, value.detach())
    return Snapshot(form, _reduced(form, np.array(value)))


def features(work: Work) -> Features:
    """Compute the work columns. Raises `ContractError` for values that cannot be lengths."""
    if isinstance(work, Features):
        return work
    if isinstance(work, Snapshot):
        work = _lengths(work.form, np.asarray(work.values)) * work.times
    elif any(type(length) is not int for length in work):
        work = tuple(map(_number, work))
    if not work:
        return Features(0, 0, 0, 0)
    tokens = sum(work)
    if min(work) < 0 or int(tokens) != tokens:
        raise ContractError("seq_lens", "must be whole numbers, 0 or more")
    count = len(work) - work.count(0)
    return Features(int(tokens), count, int(sum(map(mul, work, work))), int(max(work)))


def _of_tensor(form: Form, tensor: Any) -> Snapshot | None:
    """Reduce and copy a device tensor in the order of its stream, without waiting for it."""
    if not tensor.is_cuda:
        return Snapshot(form, _reduced(form, tensor).clone().numpy())
    import torch

    with torch.cuda.device(tensor.device):  # of which the current stream and the event are
        if torch.cuda.is_current_stream_capturing():
            return None
        values = _reduced(form, tensor).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return Snapshot(form, values, arrived)


def _reduced(form: Form, values: Any) -> Any:
    """Reduce a mask to what is small; keep other forms. Tensors and arrays alike.

    Two dimensions: a padding mask, nonzero at tokens. Three or four: nonzero where a position
    attends to another, of the first head; floating masks are additive (0 attends).
    """
    if form is not Form.ATTENTION_MASK:
        return values
    if values.ndim == 4:
        values = values[:, 0]
    if values.ndim not in (2, 3):
        raise ContractError("attention_mask", f"must have 2 to 4 dimensions, not {values.ndim}")
    if values.ndim == 2:
        return (values != 0).sum(-1)
    return _reduced_attention(values)


def _reduced_attention(values: Any) -> Any:
    """Reduce a mask (rows, queries, positions) to (rows, positions): 0 at padding, which does not
    attend to itself, 1 at the first token of a sequence, 2 at the others, each of which attends to
    the one before: two diagonals of what may be large. With other queries than positions, as one
    for all, to the tokens of each row, to which some attend.
    """
    is_additive = "float" in str(values.dtype)

    def attends(part: Any) -> Any:
        return part == 0 if is_additive else part != 0

    if values.shape[-2] != values.shape[-1]:
        return attends(values).any(-2).sum(-1)
    codes = attends(values.diagonal(0, -2, -1)) + 0
    codes[:, 1:] *= attends(values.diagonal(-1, -2, -1)) + 1
    return codes


def _number(length: Any) -> Any:
    """Return an element of an array or tensor as a number of Python, whose square is exact."""
    item = getattr(length, "item", None)
    return length if item is None else item()


def _lengths(form: Form, values: NDArray[Any]) -> tuple[int, ...]:
    if form is Form.SEQ_LENS:
        lengths = values.ravel()
    elif form is Form.CU_SEQLENS:
        lengths = np.diff(values.ravel())
    elif form is Form.POSITION_IDS:
        lengths = _between_restarts(values)
    elif values.ndim == 1:
        lengths = values
    else:
        codes = values.ravel()
        lengths = np.add.reduceat(codes > 0, np.flatnonzero(codes == 1), dtype=np.int64)
    return tuple(lengths.tolist())


def _between_restarts(positions: NDArray[Any]) -> NDArray[Any]:
    """Lengths of packed sequences from positions that count up within each and restart with the
    next, and with each row.

    >>> _between_restarts(np.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])).tolist()
    [3, 2, 5]
    """
    rows = np.atleast_2d(positions[0] if positions.ndim == 3 else positions)
    begins = np.ones(rows.shape, bool)
    begins[:, 1:] = np.diff(rows, axis=-1) != 1
    return np.diff(np.flatnonzero(begins), append=rows.size)
