"""Inputs of the runtime that are the same in every generation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from resihp._devices import with_index
from resihp.contracts import ContractError, Op
from resihp.layout import StateCopies

from ..microbatches.balancing import StepWork
from ..models import Model
from ..optim import Optimizer
from ..process_groups.communicators import CPU
from ..rendezvous.joiners import describe_model
from .data import DataSource
from .pacing import Pacer


class Recorder(Protocol):
    """Takes microbatch records; `resihp.hooks.Monitor.record` is one."""

    def __call__(
        self,
        *,
        op: Op,
        step: int,
        microbatch: int,
        compute_ms: float,
        wait_ms: float,
        chunk: int = 0,
        tokens: int = -1,
        sequences: int = -1,
        sum_sq_len: int = -1,
        max_len: int = -1,
    ) -> None: ...


class TransferRecorder(Protocol):
    """Takes the record of one end of a transfer; `resihp.hooks.Monitor.record` is one."""

    def __call__(
        self,
        *,
        op: Op,
        step: int,
        microbatch: int,
        chunk: int,
        compute_ms: float,
        peer: int,
        start_ms: float,
    ) -> None: ...


Recompute = Literal["layers", "attention"]
"""What backward passes compute again: whole layers, or the cores of attention alone."""


def record_nothing(**fields: Any) -> None:
    """Discard a record."""


@dataclass(frozen=True)
class Setup:
    """Inputs of the runtime that are the same in every generation.

    compute_dtype  precision of the operators under torch's autocast, `torch.bfloat16`;
                   parameters, gradients and sums between ranks stay float32. None: all float32
    recompute      what backward passes compute again instead of keeping it: "layers" keeps the
                   inputs of layers alone; "attention" keeps all but what attention makes of
                   queries, keys and values; None: everything is kept. Changes no bit, on
                   accelerators with `deterministic`
    compile_backend
                   backend of `torch.compile` ("inductor") for what layers compute between matrix
                   products, attention and collectives; not with `recompute`, and without effect in
                   zero-bubble schedules, whose halves run it twice. None: nothing is compiled
    deterministic  sum gradients in an order fixed by microbatch index, so that a loss changes no
                   bit of the training; costs memory and some speed (`DeterministicGradientSum`),
                   on accelerators also the fused kernels of attention
    bucket_bytes   size of a gradient all-reduce that overlaps with backward
    device         of parameters, gradients and microbatches, or its name; a CUDA device without
                   index is the current one of this thread
    record_transfer
                   takes the records of transfers between stages, of both ends; None: not recorded
    work           assigns microbatches by their work, not by their number alone: a function from a
                   step to the work of each of its microbatches (`microbatch_flops`), alike on every
                   rank; None: all count alike, and consecutive ones go to the same replica
    steal_ahead    a replica of one stage that has no microbatch left takes pending ones of the
                   slowest such replica, if it is then ahead by more than so many mean microbatches;
                   None: none does
    optimizer_replicas
                   replicas that hold the optimizer's state of each range of a parameter (ZeRO
                   stage 1): at 2, the loss of a rank costs none of it; at 1, training goes back to
                   a checkpoint then. None: all that hold the parameter
    ranks_per_node of consecutive numbers; where they can, replicas that hold the same state are on
                   several nodes. `train` takes it from the job
    max_in_flight  most microbatches of which a stage may hold activations, which orders of passes
                   keep to; None: unlimited. `train` takes it from the job
    """

    model: Model
    optimizer: Optimizer
    data: DataSource
    record: Recorder = record_nothing
    pacer: Pacer | None = None
    compute_dtype: torch.dtype | None = None
    recompute: Recompute | None = None
    compile_backend: str | None = None
    deterministic: bool = False
    bucket_bytes: int = 25 << 20
    device: torch.device = CPU
    record_transfer: TransferRecorder | None = None
    work: StepWork | None = None
    steal_ahead: float | None = None
    optimizer_replicas: int | None = None
    ranks_per_node: int = 1
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", with_index(torch.device(self.device)))
        if self.bucket_bytes < 1:
            raise ContractError("bucket_bytes", f"must be 1 or more, not {self.bucket_bytes}")
        if self.optimizer_replicas is not None and self.optimizer_replicas < 1:
            raise ContractError(
                "optimizer_replicas", f"must be 1 or more, not {self.optimizer_replicas}"
            )
        if self.optimizer_replicas is not None and self.optimizer.is_fused:
            raise ContractError(
                "fused", "with optimizer_replicas ranks update columns of tensors, not dense ones"
            )
        if self.recompute not in (None, *get_args(Recompute)):
            known = " or ".join(map(repr, get_args(Recompute)))
            raise ContractError("recompute", f"must be {known} or None, not {self.recompute!r}")
        if self.compile_backend is not None:
            backends = torch.compiler.list_backends(exclude_tags=())
            if self.compile_backend not in backends:
                found = f"{', '.join(backends)}, or None; not {self.compile_backend!r}"
                raise ContractError("compile_backend", f"must be one of {found}")
            if self.recompute is not None:
                why = "what a compiled part keeps may differ from what it keeps when it runs again"
                raise ContractError("compile_backend", f"not with recompute: {why}")
        if self.compute_dtype not in (None, torch.bfloat16):
            why = "gradients are not scaled against underflow"
            raise ContractError(
                "compute_dtype", f"must be torch.bfloat16 or None, not {self.compute_dtype}: {why}"
            )
        if self.steal_ahead is not None and not self.steal_ahead >= 0.0:
            raise ContractError("steal_ahead", f"must be 0 or more, not {self.steal_ahead}")

    @property
    def state_copies(self) -> StateCopies | None:
        """Copies of each range of the optimizer's state; None: on all that hold the parameter."""
        if self.optimizer_replicas is None:
            return None
        return StateCopies(self.optimizer_replicas, self.ranks_per_node)

    @cached_property
    def described_model(self) -> str:
        """Description of the model, by which ranks and checkpoints of another one are told."""
        return describe_model((one.key, one.shape) for one in self.model.parameters.all)

    def casting_once(self) -> AbstractContextManager[None]:
        """Have the passes inside share one copy of the weights in `compute_dtype`.

        torch drops its copies at the end of the outermost autocast: each microbatch between its
        forward and its backward pass would keep copies of its own. Where layers are recomputed none
        is kept between passes. Do not update weights inside.
        """
        if self.compute_dtype is None or self.recompute == "layers":
            return nullcontext()
        around: AbstractContextManager[None] = torch.autocast(self.device.type, enabled=False)
        return around

    def attention_kernels(self) -> AbstractContextManager[None]:
        """Have attention compute the same bits each time where `deterministic` asks for it.

        Backward passes of the fused kernels of accelerators sum in the order in which blocks end.
        The choice holds for the whole process meanwhile: enter it in one thread at a time.
        """
        if not self.deterministic or self.device.type == "cpu":
            return nullcontext()
        kernels: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
        return kernels
