"""One rank's connections to the store, and what becomes of it when the store is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

_log = logging.getLogger("resihp.elastic")
Answer = TypeVar("Answer")


class StoreLink:
    """Few connections, which are used again: making one is slow where names are looked up.

    `store` is for questions that are answered at once, from any thread; `is_cut_off` once it has
    not answered. `open` makes a further connection, `borrow` takes one that is free.
    """

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self.open = open_store
        self.store = open_store()
        self.is_cut_off = False
        self._spare: list[dist.Store] = []

    def borrow(self) -> dist.Store:
        """A connection for a thread that may block in it."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.open()

    def give_back(self, store: dist.Store) -> None:
        """A connection of `borrow` in which no thread can be blocked any more."""
        self._spare.append(store)

    def ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The store's answer; `otherwise`, now and ever after, if it is gone."""
        if self.is_cut_off:
            return otherwise
        try:
            return question()
        except dist.DistError as error:
            self.cut_off(error)
            return otherwise

    def cut_off(self, error: Exception) -> None:
        """Note that the store is gone, and say so once."""
        if not self.is_cut_off:
            self.is_cut_off = True
            _log.error("the store is gone; training goes on, but cannot change: %s", error)
