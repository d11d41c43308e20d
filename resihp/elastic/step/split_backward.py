"""Backward pass in two halves: gradients of the input first, of the weights later.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. The first half walks the
graph from the output to the input and stores the gradient that arrives at each operator with
weights; the second half runs those operators again, for their weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Operator:
    """Operator with weights between input and output, and the gradient that arrived at it."""

    node: Node
    weights: list[torch.Tensor]
    arrived: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)

    def note(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Store the gradient that arrived; a hook of the node."""
        self.arrived = [
            (GradientEdge(self.node, index), gradient)
            for index, gradient in enumerate(gradients)
            if gradient is not None
        ]

    def run(self) -> None:
        """Add the gradients of the weights to their `.grad`."""
        if self.arrived:
            edges, gradients = zip(*self.arrived, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.weights)


class SplitBackward:
    """Two halves of one backward pass from `output` to the leaf `entry`.

    Weights that several operators share (the experts of a layer, which are cut out of one tensor)
    get their gradients in the first half, where autograd adds them up in one go.
    """

    def __init__(self, entry: torch.Tensor, output: torch.Tensor) -> None:
        self._entry, self._output = entry, output
        operators = list(_operators(entry, output))
        users: dict[torch.Tensor, int] = {}
        for operator in operators:
            for weight in operator.weights:
                users[weight] = users.get(weight, 0) + 1
        self._operators = [o for o in operators if all(users[w] == 1 for w in o.weights)]
        among = {weight for o in self._operators for weight in o.weights}
        self._early = [weight for weight in users if weight not in among]

    def run_input(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `entry`, given that of `output`."""
        if self._output is self._entry:
            self._entry.grad = gradient
            return gradient
        hooks = [o.node.register_prehook(o.note) for o in self._operators]
        torch.autograd.backward(
            self._output, gradient, inputs=[self._entry, *self._early], retain_graph=True
        )
        for hook in hooks:
            hook.remove()
        assert self._entry.grad is not None
        return self._entry.grad

    def run_weights(self) -> None:
        """Add the gradients of all other weights to their `.grad`."""
        for operator in self._operators:
            operator.run()


def _operators(entry: torch.Tensor, output: torch.Tensor) -> Iterator[_Operator]:
    """Return the operators with weights from `output` back to `entry`, in that order."""
    if output is entry or output.grad_fn is None:
        return
    order = _descendants(output.grad_fn)
    on_the_way = {get_gradient_edge(entry).node}
    for node in order:
        if any(child in on_the_way for child in _children(node)):
            on_the_way.add(node)
    for node in reversed(order):
        if node in on_the_way:
            aside = [child for child in _children(node) if child not in on_the_way]
            weights = dict.fromkeys(leaf for child in aside for leaf in _leaves(child))
            if weights:
                yield _Operator(node, list(weights))


def _descendants(root: Node) -> list[Node]:
    """Return `root` and all nodes below it, each after those below it."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(_children(root)))]
    while stack:
        node, children = stack[-1]
        child = next(children, None)
        if child is None:
            order.append(node)
            stack.pop()
        elif child not in seen:
            seen.add(child)
            stack.append((child, iter(_children(child))))
    return order


def _leaves(root: Node) -> Iterator[torch.Tensor]:
    """Return the tensors whose gradients accumulate below `root`."""
    for node in _descendants(root):
        leaf = getattr(node, "variable", None)  # only nodes that add to a leaf's `.grad` have it
        if leaf is not None:
            yield leaf


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
