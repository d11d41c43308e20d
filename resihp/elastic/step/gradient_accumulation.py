"""One rank's gradients of the step in progress, and the account of what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from resihp.layout import Param

from ..microbatches.assignment import Assignment
from ..microbatches.ledger import Spans, spans
from ..microbatches.tree_sum import Node, put

Gradients = dict[Param, torch.Tensor]
"""By parameter, each with the range that the rank holds."""

Parts = list[tuple[Node, Gradients]]
"""Sums of microbatches, ascending. What is summed in any order is one part."""


@dataclass(frozen=True)
class StepRemainder:
    """With what one rank goes on in a step that another generation has begun.

    shares  of all replicas
    parts   sums that this rank's replica takes over, cut as its shard is
    losses  of the microbatches in all kept sums
    """

    shares: tuple[Assignment, ...]
    parts: Parts = field(default_factory=list)
    losses: Mapping[int, float] = field(default_factory=dict)


class GradientSum:
    """Gradients added up in `.grad`, in the order in which the backward passes end.

    `parts` is what moves when the layout changes in mid-step; `start` takes it in.
    """

    def __init__(self, tensors: Mapping[Param, nn.Parameter], microbatches: int) -> None:
        self.losses: dict[int, float] = {}
        self._tensors, self._microbatches = tensors, microbatches
        self._begun: set[int] = set()
        self._is_torn = False

    @property
    def finished(self) -> Spans:
        """The microbatches in the sum; none if a backward pass was broken off inside it."""
        return () if self._is_torn else spans(self.losses)

    def start(self, parts: Parts, losses: Mapping[int, float]) -> None:
        """Begin a step, or the rest of one, with `parts` of it. Their memory is reused."""
        self.losses, self._is_torn = dict(losses), False
        for tensor in self._tensors.values():
            tensor.grad = None
        self._take(parts)

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """A backward pass (or one half of it, or that of one chunk) of `microbatch`."""
        torn_before, self._is_torn = self._is_torn, True
        yield
        self._collect(microbatch)
        self._is_torn = torn_before

    def finish(self, microbatch: int, loss: float) -> None:
        """All passes of `microbatch` are done here; `loss` is this rank's part of the mean."""
        assert microbatch not in self.losses, f"microbatch {microbatch} is summed twice"
        self._close(microbatch)
        self.losses[microbatch] = loss

    def parts(self) -> Parts:
        """What has been summed up, to be moved or reduced."""
        return [((0, self._microbatches), self.whole())]

    def whole(self) -> Gradients:
        """The sum, where there is only one; zeros where nothing was added."""
        for tensor in self._tensors.values():
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        return {param: _grad(tensor) for param, tensor in self._tensors.items()}

    def _take(self, parts: Parts) -> None:
        for _, gradients in parts:
            for param, gradient in gradients.items():
                tensor = self._tensors[param]
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)

    def _collect(self, microbatch: int) -> None:
        """Nothing: autograd has added it up."""

    def _close(self, microbatch: int) -> None:
        """Nothing."""


class DeterministicGradientSum(GradientSum):
    """Gradients added up in the fixed order of `tree`, whoever computed them.

    Costs about log2(quota) gradients of memory more, and one addition apart from autograd's.
    """

    def __init__(self, tensors: Mapping[Param, nn.Parameter], microbatches: int) -> None:
        super().__init__(tensors, microbatches)
        self._held: dict[Node, Gradients] = {}
        self._open: dict[int, Gradients] = {}

    @property
    def finished(self) -> Spans:
        """The microbatches in the sums; one that was broken off is not among them."""
        return spans(self.losses)

    def parts(self) -> Parts:
        """The sum of each node, ascending."""
        return sorted(self._held.items(), key=lambda item: item[0])

    def whole(self) -> Gradients:
        """The sum of all microbatches of the step, all of which must be here."""
        return self._held[0, self._microbatches]

    def _take(self, parts: Parts) -> None:
        self._held, self._open = {}, {}
        for node, gradients in parts:
            put(self._held, node, gradients, self._microbatches, added)

    def _collect(self, microbatch: int) -> None:
        gradients = self._open.setdefault(microbatch, {})
        for param, tensor in self._tensors.items():
            gradient, tensor.grad = tensor.grad, None
            if gradient is not None:
                before = gradients.get(param)
                gradients[param] = gradient if before is None else before.add_(gradient)

    def _close(self, microbatch: int) -> None:
        gradients = self._open.pop(microbatch, {})
        for param, tensor in self._tensors.items():
            if param not in gradients:
                gradients[param] = torch.zeros_like(tensor)
        node = (microbatch, microbatch + 1)
        put(self._held, node, gradients, self._microbatches, added)


def added(left: Gradients, right: Gradients) -> Gradients:
    """left + right, in the memory of `left`."""
    for param, gradient in left.items():
        gradient.add_(right[param])
    return left


def _grad(tensor: nn.Parameter) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad
