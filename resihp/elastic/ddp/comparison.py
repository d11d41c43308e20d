"""Comparison of what replicas must have alike: else they would block each other, or train apart."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

from resihp.contracts import ContractError, JoinRefusedError

from ..process_groups.abortable import AbortableProcessGroup
from .checks import fingerprint
from .gradients import LoopGradients
from .step import ReplicaCoordinates

_NOTHING = (-math.inf, -math.inf)
_TRAINED_APART = "its trained parameters differ between replicas: set requires_grad alike in all"
_SETTINGS_APART = (
    "its settings differ between replicas: set them alike, and give `state` the LR schedules, so "
    "that joiners continue with them"
)


class ReplicaComparison:
    """Comparison of this process with those of its index in the other replicas; some differ: all
    end, with `ContractError`.

    A replica that joins is new until it has agreed with the others behind an update of its own. It
    has no say in what is right until then, and ends alone, with `JoinRefusedError`.

    description  of what stays as it is; that of a joiner was compared as it joined
    """

    def __init__(
        self,
        description: str,
        sums: LoopGradients,
        optimizers: Sequence[torch.optim.Optimizer],
        coordinates: ReplicaCoordinates,
    ) -> None:
        self._description, self._sums, self._optimizers = description, sums, optimizers
        self._coordinates, self._is_new = coordinates, coordinates.joins
        self._last_without_state = -1

    def compare(self, group: AbortableProcessGroup, step: int, *, has_state: bool) -> None:
        """Compare before a step's gradients are summed: the buckets of all are alike then.

        Due over new groups, and in the step behind one in which the state was sent.
        """
        if not has_state:
            self._last_without_state = step
        described, trained = zlib.crc32(self._description.encode()), self._sums.trained
        settings = fingerprint(self._optimizers)
        own_trained = _NOTHING if self._is_new else (trained, -trained)
        own_settings = (settings, -settings) if has_state and not self._is_new else _NOTHING
        numbers = [described, -described, *own_trained, *own_settings]
        told = torch.tensor(numbers, dtype=torch.float64, device=group.device)
        most, least, most_trained, least_trained, known, _ = group.all_reduce_max(told).tolist()
        if most != -least:
            raise ContractError("replicas", f"are not alike: this one trains {self._description}")
        if not self._is_new:
            if most_trained != -least_trained:
                raise ContractError("model", _TRAINED_APART)
            return
        if most_trained not in (trained, -math.inf):
            raise JoinRefusedError(f"model: {_TRAINED_APART}")
        if has_state and known not in (settings, -math.inf):
            raise JoinRefusedError(f"optimizer: {_SETTINGS_APART}")
        self._is_new = step == self._last_without_state

    def ballot(self) -> list[float]:
        """Return what this rank adds to the vote of a step."""
        settings, trained = fingerprint(self._optimizers), float(self._sums.trained)
        index, members = self._coordinates.index, self._coordinates.members
        numbers = [-math.inf] * (4 * members)  # a stage may have other settings than the next one
        numbers[4 * index : 4 * index + 4] = [settings, -settings, trained, -trained]
        return numbers

    def check(self, voted: Sequence[float]) -> None:
        """Compare settings and trained parameters, as all have put them into the vote."""
        differ = [most != -least for most, least in zip(voted[::2], voted[1::2], strict=True)]
        if any(differ[1::2]):
            raise ContractError("model", _TRAINED_APART)
        if any(differ[::2]):
            raise ContractError("optimizer", _SETTINGS_APART)
