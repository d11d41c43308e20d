"""Claims on microbatches through the store, which answers even where a replica is stalled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from resihp._shutdown import start_thread

from . import keys
from .membership import Rendezvous

_Answer = dict[int, int]


@dataclass
class _Request:
    """Request to the store; `answer` is valid once `is_answered`."""

    run: Callable[[], _Answer]
    is_answered: threading.Event = field(default_factory=threading.Event)
    answer: _Answer = field(default_factory=dict)


class StoreClaims:
    """Counters of claims of one step after the other, in the store of a job.

    A thread asks the store. An answer that does not come within `patience_s`, or never because the
    store is gone, counts as unknown; until it has come, all others do too. So a store that is slow
    or gone delays a step by this time at most.
    """

    def __init__(self, rendezvous: Rendezvous, *, patience_s: float = 1.0) -> None:
        self._rendezvous, self._stores = rendezvous, rendezvous.stores
        self._patience_s = patience_s
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._last = _Request(dict)
        self._last.is_answered.set()
        self._keys: Callable[[int], str] = str
        self._own_key = ""
        self._unused: list[str] = []
        requests = self._requests
        start_thread(
            threading.Thread(target=self._serve, name="resihp-claims", daemon=True),
            lambda: requests.put(None),
        )

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._requests.put(None)

    @property
    def is_answering(self) -> bool:
        """True if requests of the next step can expect an answer."""
        return self._last.is_answered.is_set() and not self._stores.is_cut_off

    def begin(self, generation: int, step: int, own: int | None) -> None:
        """Begin a step, whose counters are 0; `own`: the replica whose counters this rank deletes.

        That of the step before is deleted with the next request: all ranks have left that step.
        """
        recovery = self._rendezvous.recovery
        self._keys = lambda replica: keys.claims(recovery, generation, step, replica)
        if self._own_key:
            self._unused.append(self._own_key)
        self._own_key = "" if own is None else self._keys(own)

    def add(self, replica: int, amount: int) -> Callable[[], int | None]:
        """Begin to add to the counter of a replica; the result waits. None: unknown."""
        key = self._keys(replica)
        answer = self._ask(lambda: {replica: self._stores.store.add(key, amount)})
        return lambda: answer().get(replica)

    def read(self, replicas: Sequence[int]) -> Mapping[int, int]:
        """Return the counters of `replicas`, without those that are unknown."""
        names = {replica: self._keys(replica) for replica in replicas}
        return self._ask(lambda: {r: self._stores.store.add(key, 0) for r, key in names.items()})()

    def _ask(self, request: Callable[[], _Answer]) -> Callable[[], _Answer]:
        """Send a request; the result waits for its answer, which is empty if it does not come."""
        if not self.is_answering:
            return dict
        unused, self._unused = self._unused, []

        def run() -> _Answer:
            for key in unused:
                self._stores.store.delete_key(key)
            return request()

        self._last = sent = _Request(run)
        self._requests.put(sent)
        return lambda: sent.answer if sent.is_answered.wait(self._patience_s) else {}

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            request.answer = self._stores.ask(request.run, {})
            request.is_answered.set()
