"""Arguments of a job, which all of its ranks must be started with alike."""

from __future__ import annotations

import json
from collections.abc import Mapping

from resihp.contracts import ContractError

from . import keys
from .store import StorePool


def check_arguments(stores: StorePool, rank: int, given: Mapping[str, object]) -> None:
    """Compare the arguments of `rank`, by name, with those of the rank that came first.

    Every rank calls this once, at the start of the job. Raises `ContractError` with the first name
    under which they differ.
    """
    own = json.dumps({"rank": rank, **given})
    stored = stores.ask(lambda: stores.store.compare_set(keys.ARGUMENTS, "", own), own.encode())
    first = json.loads(stored)
    for name, value in json.loads(own).items():
        if name != "rank" and value != first[name]:
            raise ContractError(
                name, f"is {value} on rank {rank}, and {first[name]} on rank {first['rank']}"
            )
