"""Optimizer of a job, built on every rank for the ranges that it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from resihp.contracts import ContractError
from resihp.layout import Param, Parameters

from .optimizer_state import OptimizerStateSpec, find_state_spec
from .rates import Rate, constant

Options = Mapping[str, Any]


def no_decay_on_vectors(param: Param) -> Options:
    """Return options without weight decay for norms and biases."""
    return {"weight_decay": 0.0} if len(param.shape) == 1 else {}


class Optimizer:
    """Elementwise optimizer, such as most of `torch.optim`.

    `Optimizer(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, rate=warmup_cosine(100, 10_000))`

    kind      makes the optimizer of some parameters; further keywords are passed on to it
    rate      factor on the learning rate, as a function of the step
    max_norm  the gradient is scaled down to this norm over the whole model; None: never
    options   of each parameter, where they differ from the keywords (`no_decay_on_vectors`)
    is_fused  its kernels update all state in one pass, of tensors that are dense in memory

    Raises `ContractError` for an optimizer whose state cannot be sharded by range; `build` raises
    it for options that change the kind of state of some parameters.
    """

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        *,
        rate: Rate = constant,
        max_norm: float | None = 1.0,
        options: Callable[[Param], Options] = lambda param: {},
        **keywords: Any,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ContractError("max_norm", f"must be above 0, not {max_norm}")
        self.rate, self.max_norm, self.is_fused = rate, max_norm, bool(keywords.get("fused"))
        self._make, self._options = partial(kind, **keywords), options
        self._name = getattr(kind, "__name__", repr(kind))
        self.form: OptimizerStateSpec = find_state_spec(self._name, self._make)
        self._checked = {repr([])}

    @property
    def copies(self) -> int:
        """Tensors that move for each parameter besides itself."""
        return 1 + len(self.form.moments)

    def groups(self, parameters: Parameters) -> list[tuple[Options, list[Param]]]:
        """Return the parameters of a model grouped by options; equal on every rank."""
        groups: dict[str, tuple[Options, list[Param]]] = {}
        for param in parameters.all:
            options = self._options(param)
            label = _label(options)
            groups.setdefault(label, (options, []))[1].append(param)
        return list(groups.values())

    def build(
        self, parameters: Parameters, tensors: Iterable[tuple[Param, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Build the optimizer of one rank's tensors, with the parameter groups of `groups`.

        tensors  each with the parameter of which it is all, or some rows
        """
        by_options = self.groups(parameters)
        held: dict[Param, list[nn.Parameter]] = defaultdict(list)
        for param, tensor in tensors:
            held[param].append(tensor)
        for options, _ in by_options:
            self._check(options)
        built = self._make(
            [
                {"params": [one for param in params for one in held[param]], **options}
                for options, params in by_options
            ]
        )
        for group in built.param_groups:
            if group.get("fused") and any(t.device.type == "cpu" for t in group["params"]):
                # Its vector loop and the loop for the rest round differently.
                raise ContractError(
                    "fused", "on a CPU, copies that are cut differently would drift"
                )
            group["initial_lr"] = float(group["lr"])
        return built

    def _check(self, options: Options) -> None:
        """Check that options do not change the kind of state."""
        if _label(options) in self._checked:
            return

        def make(params: ParamsT) -> torch.optim.Optimizer:
            return self._make([{"params": list(params), **options}])

        form = find_state_spec(self._name, make)
        if form != self.form:
            raise ContractError("options", f"{dict(options)} change what {self._name} keeps")
        if form.writes_gradients:
            self.form = replace(self.form, writes_gradients=True)
        self._checked.add(_label(options))

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of `step` in every group."""
        factor = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


def _label(options: Options) -> str:
    return repr(sorted(options.items()))
