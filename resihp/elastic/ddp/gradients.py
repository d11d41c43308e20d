"""Gradients of one step in one process of a user's loop: accumulation and sum over replicas."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from resihp.contracts import ContractError

from ..microbatches.assignment import Assignment
from ..microbatches.ledger import indices
from ..microbatches.tree_sum import Node, nodes, put
from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice, is_placed_apart
from ..process_groups.tree_allreduce import tree_allreduce
from .fsdp import sharded_parameters
from .groups import ReplicaGroups

_WATCHED = 16
"""Parameters whose gradients are watched for other writes than those of backward, about."""


class LoopGradients:
    """Gradient accumulation of one rank; local sums do not change until `use`.

    overlap     all-reduce buckets during the last backward passes; not with DDP inside a replica,
                which sums a gradient when backward has added to it
    ordered     sum in the fixed order of `tree_sum`, in fp32
    parameters  trained in this step
    trained     hash of their names and sizes
    total       sums over all replicas; None until `sum_over`
    """

    def __init__(
        self,
        model: nn.Module,
        microbatches: int,
        *,
        bucket_bytes: int,
        overlap: bool,
        ordered: bool,
    ) -> None:
        self._model, self._all = model, list(model.parameters())
        self._labels = [f"{name} {one.numel()}" for name, one in model.named_parameters()]
        self.parameters: list[nn.Parameter] = []
        self.trained = 0
        self._sharded = sharded_parameters(model)
        for parameter in self._all if ordered else []:
            if parameter.dtype == torch.float64 or parameter.is_complex():
                dtype = str(parameter.dtype).removeprefix("torch.")
                why = f"sums are made in fp32: too few bits for {dtype}"
                raise ContractError("deterministic", why)
        self.total: list[torch.Tensor] | None = None
        self._microbatches, self._bucket_bytes = microbatches, bucket_bytes
        self._has_ddp = any(isinstance(one, DistributedDataParallel) for one in model.modules())
        self._overlap, self._ordered = overlap and not ordered and not self._has_ddp, ordered
        self._held: dict[Node, list[torch.Tensor]] = {}
        self._ahead: BucketedAllReduce | None = None
        self._summed: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start a step without gradients, also of parameters frozen since the last one.

        Raises `ContractError` if the model has other parameters than at first.
        """
        if list(map(id, self._model.parameters())) != list(map(id, self._all)):
            raise ContractError(
                "model",
                "it has other parameters than when `Replicas` was made: add and replace them "
                "(LoRA, a new head) before",
            )
        self.total, self._ahead, self._held, self._summed = None, None, {}, []
        self.parameters = [parameter for parameter in self._all if parameter.requires_grad]
        labels = compress(self._labels, (parameter.requires_grad for parameter in self._all))
        self.trained = zlib.crc32(",".join(labels).encode())
        self._drop()

    @contextmanager
    def adding(
        self,
        microbatches: Sequence[int],
        groups: ReplicaGroups,
        *,
        is_last: bool,
        is_batch: bool = False,
    ) -> Iterator[None]:
        """Enclose the passes of `microbatches`; the sums of the last ones are sent over `groups`.

        is_batch  they are computed at once, by the schedule of a pipeline, in which FSDP2 adds to
                  its gradients at the end
        """
        if self._ordered and len(microbatches) > 1:
            raise ContractError(
                "deterministic",
                "the schedule of a pipeline adds microbatches up in an order of its own: iterate "
                "over the step itself, one microbatch at a time",
            )
        earlier = self._set_aside() if is_batch else {}
        gradients = [parameter.grad for parameter in self.parameters]
        before = [(gradient, _writes(gradient)) for gradient in gradients]
        # A schedule may add to some gradients without backward; DDP writes to them behind it.
        is_watched = len(microbatches) == 1 and not self._has_ddp
        watch = _BackwardWatch(self.parameters if is_watched else [], self._sharded)
        exchange: AbstractContextManager[None] = nullcontext()
        if is_last and self._overlap and not earlier and len(groups.data_parallel) > 1:
            self._ahead = self._all_reduce(groups)
            exchange = self._ahead.overlapped(
                passes=lambda one: 1 if one in self._sharded else len(microbatches)
            )
        with watch, exchange:
            yield
        self._check(before, has_changed=watch.has_changed)
        _add_to(earlier)
        if is_last or self._ordered:
            self._redistribute()
        if self._ordered:
            leaf = [gradient.float() for gradient in self._local()]
            self._drop()
            [index] = microbatches
            put(self._held, (index, index + 1), leaf, self._microbatches, _added)

    def sum_over(self, groups: ReplicaGroups, shares: Sequence[Assignment], index: int) -> None:
        """Compute `total`; `shares` are the assignments of all replicas, `index` is this one's."""
        if self._ordered:
            self.total = self._sum_nodes(groups.data_parallel, shares, index)
            return
        if len(groups.data_parallel) == 1 and not self._summed:
            self.total = self._local()
            return
        self._ahead = self._ahead or self._all_reduce(groups)
        summed = dict(self._ahead.finish())
        self.total = [summed[one] for one in reversed(summed)]

    def use(self, weight: float | None) -> None:
        """Replace the local gradients by `total`, divided by `weight`."""
        assert self.total is not None, "only gradients that are whole everywhere may be used"
        if weight is not None:
            for total in self.total:
                total.div_(weight)
        self._put_in_place(self.total)

    def stop(self) -> int:
        """Give up the exchange under way; return the number of buckets summed by then."""
        if self._ahead is not None:
            self._summed, self._ahead = self._ahead.summed(), None
        return len(self._summed)

    def keep(self, share: Assignment, buckets: int) -> None:
        """Bring the local sums to the state that was decided after a loss.

        buckets  that all survivors have summed: they hold all microbatches, those of the lost
                 replica too, and do not travel again
        """
        self._summed = self._summed[:buckets]
        if not share.inherited:
            self._held.clear()
            self._drop()
        elif share.inherited[0].total:
            assert self.total is not None
            self._held = {(0, self._microbatches): self.total}
            self._put_in_place(self.total)
        self.total = None

    def _sum_nodes(
        self, group: AbortableProcessGroup, shares: Sequence[Assignment], index: int
    ) -> list[torch.Tensor]:
        """Return the sums over replicas in the fixed order of the tree, in fp32."""
        own = [held for _, held in sorted(self._held.items(), key=lambda item: item[0])]
        like, leaves = self._local(), self._microbatches  # also gives every parameter a gradient
        if len(group) == 1:
            return own[0]
        nodes_of = [nodes(indices(share.whole), leaves) for share in shares]
        sizes = [tensor.numel() for tensor in like]
        device = next((tensor.device for tensor in like), None)
        flat = tree_allreduce(group, index, own, sum(sizes), nodes_of, leaves, device=device)
        parts = zip(flat.split(sizes), like, strict=True)
        return [part.view_as(tensor) for part, tensor in parts]

    def _all_reduce(self, groups: ReplicaGroups) -> BucketedAllReduce:
        slices = [GradientSlice(parameter) for parameter in reversed(self.parameters)]
        return BucketedAllReduce([(groups.data_parallel, slices)], self._bucket_bytes, self._summed)

    def _local(self) -> list[torch.Tensor]:
        """Return the local part of each gradient; zeros where there is none."""
        return [GradientSlice(parameter).read() for parameter in self.parameters]

    def _redistribute(self) -> None:
        """Give gradients the placements of their parameters; collective over their meshes.

        The sums of a replica that has computed nothing have those, too.
        """
        for parameter in self.parameters:
            if is_placed_apart(parameter):
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter.grad, DTensor)
                placements = parameter.placements
                parameter.grad = parameter.grad.redistribute(placements=placements)

    def _set_aside(self) -> dict[nn.Parameter, DTensor]:
        """Take the gradients of FSDP2 from their parameters.

        A schedule of torch (2.13) that is new, for another number of microbatches, begins with
        passes that tell it the shapes between its stages, and drops FSDP2's gradients after them.
        """
        taken: dict[nn.Parameter, DTensor] = {}
        for parameter in self._sharded.intersection(self.parameters):
            if isinstance(parameter.grad, DTensor):
                taken[parameter], parameter.grad = parameter.grad, None
        return taken

    def _put_in_place(self, total: Sequence[torch.Tensor]) -> None:
        for parameter, summed in zip(self.parameters, total, strict=True):
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().copy_(summed)
            else:
                parameter.grad = _laid_out(summed.to(parameter.dtype), parameter)

    def _check(
        self, before: Sequence[tuple[torch.Tensor | None, int]], *, has_changed: bool
    ) -> None:
        """Raise `ContractError` if the loop did not accumulate gradients, or did more to them."""
        after = [parameter.grad for parameter in self.parameters]
        pairs = list(zip(before, after, strict=True))
        if not any(old is not new or count != _writes(new) for (old, count), new in pairs):
            raise ContractError(
                "step",
                "no parameter has a gradient of a microbatch: call backward() for each of them in "
                "the inner loop, and leave FSDP2's set_requires_gradient_sync(True)",
            )
        if any(new is not None and new.requires_grad for new in after):
            raise ContractError(
                "backward",
                "create_graph=True makes gradients that have a graph, and new ones each time: take "
                "derivatives of gradients by torch.autograd.grad(..., create_graph=True)",
            )
        if has_changed or any(old is not None and old is not new for (old, _), new in pairs):
            raise ContractError(
                "step",
                "gradients were zeroed, scaled or replaced within a step: that, clipping and the "
                "update belong behind the inner loop",
            )

    def _drop(self) -> None:
        for parameter in self._all:
            parameter.grad = None


class _BackwardWatch:
    """Detects writes to gradients other than those of backward, in a context.

    Looks at a few parameters, because each hook costs time: clipping and zeroing write to all.
    Gradients that share memory share their counter of writes, and are left out. Of a sharded
    gradient torch counts writes to single ones only: not clipping, which takes all at once.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], sharded: Collection[nn.Parameter]
    ) -> None:
        self._few = parameters[:: -(-len(parameters) // _WATCHED) or 1]
        self._sharded = sharded
        self._writes = {one: one.grad._version for one in self._few if one.grad is not None}
        self._added: set[nn.Parameter] = set()
        self._is_disturbed = False

    @property
    def has_changed(self) -> bool:
        """True if something else than backward has written."""
        return self._is_disturbed or any(
            one.grad is None or one.grad._version != self._writes[one] for one in self._added
        )

    def __enter__(self) -> None:
        self._hooks = [one.register_post_accumulate_grad_hook(self._add) for one in self._few]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, parameter: nn.Parameter) -> None:
        """Take note that backward has added to the gradient."""
        gradient = parameter.grad
        assert gradient is not None
        is_local = not isinstance(gradient, DTensor)
        if is_local and gradient.untyped_storage().nbytes() > gradient.nbytes:
            return
        by_backward = parameter not in self._sharded  # FSDP2 writes to the local part
        known = self._writes.get(parameter, gradient._version)
        self._is_disturbed |= gradient._version > known + by_backward
        self._writes[parameter] = gradient._version
        self._added.add(parameter)


def _writes(gradient: torch.Tensor | None) -> int:
    """Return the number of in-place writes to a gradient."""
    if gradient is None:
        return 0
    if not isinstance(gradient, DTensor):
        return gradient._version
    with torch.no_grad():  # no graph of the local part
        return gradient._version + gradient.to_local()._version


def _add_to(earlier: Mapping[nn.Parameter, DTensor]) -> None:
    """Add the gradients of parameters to earlier ones, which take their place."""
    for parameter, gradient in earlier.items():
        if isinstance(parameter.grad, DTensor):
            gradient.to_local().add_(parameter.grad.to_local())
        parameter.grad = gradient


def _laid_out(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient with the parameter's strides, which fused optimizers take it to have."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _added(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return left + right, in the memory of `left`."""
    for total, gradient in zip(left, right, strict=True):
        total.add_(gradient)
    return left
