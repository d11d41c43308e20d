"""Arguments of a job, which all of its ranks must be started with alike."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from resihp.contracts import ContractError, JoinRefusedError

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
    for name, value in _differences(first, given):
        raise ContractError(
            name, f"is {value} on rank {rank}, and {first[name]} on rank {first['rank']}"
        )


def check_joiner(stored: bytes, given: Mapping[str, object]) -> None:
    """Compare the arguments of a joiner with the `stored` ones of the job, but for the plan.

    Raises `JoinRefusedError` with the first name under which they differ.
    """
    first = json.loads(stored)
    for name, value in _differences(first, given, but=("plan",)):
        raise JoinRefusedError(f"{name}: is {value} in this process, and {first[name]} in the job")


def _differences(
    first: Mapping[str, object], given: Mapping[str, object], but: Collection[str] = ()
) -> list[tuple[str, object]]:
    own = json.loads(json.dumps(given)).items()
    return [(name, value) for name, value in own if name not in but and value != first[name]]
