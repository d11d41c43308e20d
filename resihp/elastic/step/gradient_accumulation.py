"""Gradient accumulation of one rank, with the microbatches that the sums contain."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from resihp.layout import Param

from ..microbatches.assignment import Assignment
from ..microbatches.ledger import Spans, spans
from ..microbatches.tree_sum import Node, put
from ..process_groups.bucketed_allreduce import GradientVersions, calling_behind_gradients

Gradients = dict[Param, torch.Tensor]
"""By parameter, each with the range that the rank holds."""

Parts = list[tuple[Node, Gradients]]
"""Sums of microbatches, ascending. What is summed in any order is one part."""


@dataclass(frozen=True)
class StepRemainder:
    """Remainder of a step that the previous generation began.

    shares  assignments of all replicas
    parts   sums that this rank's replica takes over, sharded as this rank's parameters
    losses  of the microbatches in all kept sums
    """

    shares: tuple[Assignment, ...]
    parts: Parts = field(default_factory=list)
    losses: Mapping[int, float] = field(default_factory=dict)


class GradientSum:
    """Sum in `.grad`, in the order in which backward passes end.

    `parts` is what moves when the layout changes within a step; `start` accepts it. `complete_sum`
    gives single ones before the step ends.
    """

    def __init__(self, tensors: Mapping[Param, nn.Parameter], microbatches: int) -> None:
        self.losses: dict[int, float] = {}
        self._tensors, self._microbatches = tensors, microbatches
        self._partial: set[int] = set()
        self._complete = frozenset[Param]()
        self._versions = GradientVersions()

    @property
    def finished(self) -> Spans:
        """Microbatches in the sum; none if it holds a part of one that is not finished."""
        return () if self._partial else spans(self.losses)

    def start(self, parts: Parts, losses: Mapping[int, float]) -> None:
        """Begin a step, or its remainder, with `parts` of it. Their memory is reused."""
        self.losses, self._partial = dict(losses), set()
        self._complete, self._versions = frozenset(), GradientVersions()
        for tensor in self._tensors.values():
            tensor.grad = None
        self._take(parts)

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Enclose a backward pass (of one chunk, or one half of it) of `microbatch`."""
        is_new, before = microbatch not in self._partial, self._writes()
        self._partial.add(microbatch)  # an interrupted pass may have added as well
        yield
        if is_new and self._writes() == before:
            self._partial.remove(microbatch)  # first half of a pass, which leaves the weights alone

    @contextmanager
    def completing(self, params: Collection[Param]) -> Iterator[None]:
        """Enclose the last pass of the step. It adds to `params`; all other sums are complete."""
        param_of = {self._tensors[param]: param for param in params}

        def added(tensor: nn.Parameter) -> None:
            self._versions.added(tensor)
            self._complete |= {param_of[tensor]}

        self._complete = frozenset(self._tensors.keys() - params)
        with calling_behind_gradients(param_of, added):
            yield

    def complete(self) -> None:
        """Take note that nothing more is added in this step."""
        self._complete = frozenset(self._tensors)

    def complete_sum(self, param: Param) -> torch.Tensor | None:
        """Return the sum of a parameter if it is complete by now; from any thread.

        `whole` raises `ContractError` if it changes after that.
        """
        tensor = self._tensors[param]
        if param not in self._complete or tensor.grad is None:
            return None
        self._versions.copied(tensor)
        return tensor.grad

    def finish(self, microbatch: int, loss: float) -> None:
        """Count `microbatch`, whose passes are done; `loss` is this rank's part of the mean."""
        assert microbatch not in self.losses, f"microbatch {microbatch} is summed twice"
        self.losses[microbatch] = loss
        self._partial.discard(microbatch)

    def parts(self) -> Parts:
        """Return the sums, to be moved or reduced."""
        return [((0, self._microbatches), self.whole())]

    def whole(self) -> Gradients:
        """Return the single sum; zeros where nothing was added."""
        self._versions.check()
        gradients: Gradients = {}
        for param, tensor in self._tensors.items():
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            gradients[param] = tensor.grad
        return gradients

    def _writes(self) -> list[tuple[int, int] | None]:
        """Return the identity of each gradient, with the number of in-place writes to it."""
        gradients = (tensor.grad for tensor in self._tensors.values())
        return [None if one is None else (id(one), one._version) for one in gradients]

    def _take(self, parts: Parts) -> None:
        for _, gradients in parts:
            for param, gradient in gradients.items():
                tensor = self._tensors[param]
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)


class DeterministicGradientSum(GradientSum):
    """Sum in the fixed order of `tree_sum`.

    Needs about log2(quota) more gradients of memory, and an addition per microbatch.
    """

    def __init__(self, tensors: Mapping[Param, nn.Parameter], microbatches: int) -> None:
        super().__init__(tensors, microbatches)
        self._held: dict[Node, Gradients] = {}
        self._open: dict[int, Gradients] = {}

    @contextmanager
    def adding(self, microbatch: int) -> Iterator[None]:
        """Enclose a backward pass; an interrupted one leaves the other sums as they are."""
        yield
        gradients = self._open.setdefault(microbatch, {})
        for param, tensor in self._tensors.items():
            gradient, tensor.grad = tensor.grad, None
            if gradient is not None:
                before = gradients.get(param)
                gradients[param] = gradient if before is None else before.add_(gradient)

    def finish(self, microbatch: int, loss: float) -> None:
        """Count `microbatch`, and add its gradients along the tree."""
        gradients = self._open.pop(microbatch, {})
        for param, tensor in self._tensors.items():
            if param not in gradients:
                gradients[param] = torch.zeros_like(tensor)
        node = (microbatch, microbatch + 1)
        put(self._held, node, gradients, self._microbatches, added)
        super().finish(microbatch, loss)

    def parts(self) -> Parts:
        """Return the sum of each node, ascending."""
        return sorted(self._held.items(), key=lambda item: item[0])

    def whole(self) -> Gradients:
        """Return the sum of all microbatches of the step; all must be present."""
        return self._held[0, self._microbatches]

    def _take(self, parts: Parts) -> None:
        self._held, self._open = {}, {}
        for node, gradients in parts:
            put(self._held, node, gradients, self._microbatches, added)


def added(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of `left`."""
    for param, gradient in left.items():
        gradient.add_(right[param])
    return left
