"""End of a training step: the optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from resihp.contracts import ContractError

from ._pass_timer import PassTimer
from ._patches import Patches, lock

_observers: list[OptimizerSteps] = []
_hooks: list[Any] = []
"""Handles of the two hooks of torch. They stay: torch fails if one is removed while they run, where
a model may end and another thread may remove its monitor."""


class OptimizerSteps:
    """Times updates and ends steps with them.

    Several optimizers: a step ends with the first update after its passes, and later ones belong
    to no step. A step whose update a gradient scaler skips ends as well.

    optimizer   whose updates count, or several, and with them every optimizer that holds a
                parameter of theirs, or one of the same name in `models`: one that they wrap, or
                that is made in their place; None: every one that holds a parameter of `models`.
                None of these is kept alive, and to parameters not even weak references are kept:
                torch swaps none that has one, as `to` does of DTensors
    """

    def __init__(
        self,
        timer: PassTimer,
        models: Sequence[torch.nn.Module],
        optimizer: Any,
        patches: Patches,
    ) -> None:
        self._timer = timer
        given = _unwrapped(optimizer)
        self._known = WeakKeyDictionary({one: (len(one.param_groups), True, 0) for one in given})
        self._given = WeakSet(given)
        held, names_of = self._given_parameters(), timer.safely(_names)
        self._models = [(ref(model), names_of(model, held) or set()) for model in models]
        self.before, self.after = timer.safely(self._before), timer.safely(self._after)
        with lock:
            if not _hooks:
                hidden: Any = torch.compiler.disable  # where the loop compiles `optimizer.step`
                _hooks.append(register_optimizer_step_pre_hook(hidden(_before_step)))
                _hooks.append(register_optimizer_step_post_hook(hidden(_after_step)))
            _observers.append(self)
        patches.add(partial(_observers.remove, self))
        scaler = getattr(torch.amp, "GradScaler", None)
        patches.wrap(scaler, "step", self._with_skipped_updates)

    def _before(self, optimizer: Optimizer) -> None:
        if self._counts(optimizer):
            self._timer.begin_update()

    def _after(self, optimizer: Optimizer) -> None:
        if self._counts(optimizer):
            self._timer.end_update()

    def _counts(self, optimizer: Optimizer) -> bool:
        """Return whether updates of an optimizer count. One that did not is looked at again where a
        step has twice the forward passes of then: parameters may have been replaced since."""
        groups, passes = len(optimizer.param_groups), self._timer.passes  # a loop may add groups
        known_groups, counts, next_passes = self._known.get(optimizer, (-1, False, 0))
        if groups != known_groups or (not counts and passes >= next_passes):
            held = self._held()
            counts = any(id(parameter) in held for parameter in _parameters(optimizer))
            self._known[optimizer] = groups, counts, max(1, 2 * passes)
        return counts

    def _held(self) -> set[int]:
        """Return the identities of the parameters whose updates count."""
        models = [(model, names) for one, names in self._models if (model := one()) is not None]
        held = self._given_parameters()
        for model, names in models:
            held.update(
                id(parameter) for name, parameter in model.named_parameters() if name in names
            )
        return held or {id(parameter) for model, _ in models for parameter in model.parameters()}

    def _given_parameters(self) -> set[int]:
        return {id(parameter) for one in self._given for parameter in _parameters(one)}

    def _with_skipped_updates(self, step: Any) -> Any:
        @self._timer.safely
        def end_skipped(optimizer: Any) -> None:
            if any(self._counts(one) for one in _unwrapped(optimizer)):
                self._timer.end_step()

        def step_or_skip(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(scaler, optimizer, *args, **kwargs)
            end_skipped(optimizer)
            return result

        return step_or_skip


def require_optimizers(optimizer: Any) -> None:
    """Raise `ContractError` if `optimizer` is none that `OptimizerSteps` takes."""
    _unwrapped(optimizer)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for steps in tuple(_observers):
        steps.before(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for steps in tuple(_observers):
        steps.after(optimizer)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(model: torch.nn.Module, held: set[int]) -> set[str]:
    """Return the names of those parameters of a model whose identities are `held`."""
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def _unwrapped(optimizer: Any) -> list[Optimizer]:
    """Optimizers of torch in one, in a list of them, or in a wrapper's attribute `optimizer`: the
    innermost, because the wrapper may be an optimizer of torch whose own steps are none."""
    if optimizer is None:
        return []
    inner, is_one = getattr(optimizer, "optimizer", None), isinstance(optimizer, Optimizer)
    if inner is not None and (
        not is_one or isinstance(inner, Optimizer) or hasattr(inner, "optimizer")
    ):
        return _unwrapped(inner)
    if is_one:
        return [optimizer]
    many = getattr(optimizer, "optimizers", optimizer)
    if isinstance(many, list | tuple) and many:
        return [one for each in many for one in _unwrapped(each)]
    raise ContractError("optimizer", f"must be an optimizer of torch, not {type(optimizer)}")
