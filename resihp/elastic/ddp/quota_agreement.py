"""Agreement of all ranks on quotas, without a wait of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from resihp.contracts import ContractError, PeerLostError

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class QuotaState:
    """Quotas in force, alike on all ranks.

    number   proposals so far
    version  of the plan they come from; 0: none
    quotas   microbatches of each rank, 1 or more
    speeds   relative speed of each rank
    """

    number: int
    version: int
    quotas: tuple[int, ...]
    speeds: tuple[float, ...]

    def as_list(self) -> list[float]:
        """Return the numbers that `read` takes; none is below 0."""
        return [float(self.number), float(self.version), *map(float, self.quotas), *self.speeds]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> QuotaState:
        """Return the state behind the numbers of `as_list`."""
        number, version, *rest = numbers
        half = len(rest) // 2
        return cls(int(number), int(version), tuple(map(int, rest[:half])), tuple(rest[half:]))


@dataclass
class QuotaAgreement:
    """Agreement of all ranks on quotas, advanced by each rank at the begin of each step.

    1. The first rank adds a proposal to the maximum that all ranks compute in step k.
    2. All ranks read it when step k + 1 begins, and add to the next maximum that they hold it.
    3. When step k + 2 begins, all ranks read that all hold it: it is in force.

    A rank that cannot read a result goes on with the quotas in force; the others do so too, because
    it holds nothing newer. Only behind 2 it cannot know: then it raises `PeerLostError`.

    start  begins the elementwise maximum of a list of numbers over all ranks; the function that it
           returns waits for the result
    """

    start: Callable[[list[float]], Callable[[], list[float]]]
    in_force: QuotaState
    failures: int = 0
    is_closed: bool = False
    _held: QuotaState = field(init=False)
    _told: int = 0
    _proposed: QuotaState | None = None
    _result: Callable[[], list[float]] | None = None

    def __post_init__(self) -> None:
        self._held = self.in_force

    @property
    def is_free(self) -> bool:
        """True where a proposal can be made."""
        return self._proposed is None and not self.is_closed

    def propose(self, state: QuotaState) -> None:
        """Propose new quotas, on the first rank alone."""
        self._proposed = replace(state, number=self.in_force.number + 1)

    def advance(self) -> bool:
        """Read the result of the last step; True if other quotas are in force from now on.

        Raises `ContractError` if the ranks ran different assignments in the last step.
        """
        if self.is_closed or self._result is None:
            return False
        try:
            least_held, check, other_check, *proposal = self._result()
        except RuntimeError as error:
            self._give_up(error)
            return False
        self._result = None
        if check != -other_check:
            raise ContractError(
                "steps",
                "the ranks are not in the same step with the same assignment: `work` must return "
                "the same numbers on every rank, and all ranks begin with the same step",
            )
        has_changed = -least_held > self.in_force.number
        if has_changed:
            self.in_force, self._proposed = self._held, None
        if proposal[0] > self._held.number:
            self._held = QuotaState.read(proposal)
        return has_changed

    def begin(self, check: int) -> None:
        """Begin the maximum of a step; `check` is a hash of what all ranks do alike in it."""
        if self.is_closed:
            return
        proposal = self._proposed or QuotaState(0, 0, *self._zeros())
        numbers = [-float(self._held.number), float(check), -float(check), *proposal.as_list()]
        try:
            self._result = self.start(numbers)
            self._told = self._held.number
        except RuntimeError as error:
            self._give_up(error)

    def finish(self) -> None:
        """Wait for what was begun, at the end of the training; a later `advance` reads it."""
        if self._result is not None:
            with suppress(RuntimeError):  # `advance` reports it
                numbers = self._result()
                self._result = lambda: numbers

    def _zeros(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        size = len(self.in_force.quotas)
        return (0,) * size, (0.0,) * size

    def _give_up(self, error: RuntimeError) -> None:
        self.is_closed, self.failures, self._result = True, self.failures + 1, None
        if self._told > self.in_force.number:
            raise PeerLostError(
                "a rank was lost while quotas changed: this one cannot know which hold"
            ) from error
        _log.warning("quotas stay as they are, their agreement failed: %s", error)
