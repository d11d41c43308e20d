"""Choice of the communicators: by the device, or by the environment."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

import torch

from resihp.contracts import ContractError

from .communicators import CPU, Communicators
from .gloo import GlooCommunicators
from .nccl import NcclCommunicators
from .reconfigure import ReconfigurableCommunicators
from .staged import StagedGlooCommunicators

_log = logging.getLogger("resihp.elastic")

VARIABLE = "RESIHP_PROCESS_GROUPS"
_MAKERS: tuple[type[Communicators], ...] = (
    GlooCommunicators,
    ReconfigurableCommunicators,
    NcclCommunicators,
    StagedGlooCommunicators,
)


def select_communicators(
    device: torch.device = CPU, environment: Mapping[str, str] = os.environ
) -> type[Communicators]:
    """Return the communicators that the environment names, else the first that fit `device`.

    Logs why those of a CUDA device go through the host, unless they are asked for by name. Raises
    `ContractError` for an unknown name, for a CUDA device without index, and where torch, NCCL or
    the device lack what the communicators need.
    """
    if device == torch.device("cuda"):
        raise ContractError("device", "has no index: each thread has a current CUDA device")
    name = environment.get(VARIABLE, "")
    names = [maker.name for maker in _MAKERS]
    if name and name not in names:
        raise ContractError(VARIABLE, f"is {name!r}; known: {', '.join(names)}")
    refusals = {maker: maker.refusal(device) for maker in _MAKERS if not name or maker.name == name}
    reasons = "; ".join(f"{maker.name}: {why}" for maker, why in refusals.items() if why)
    for maker, refusal in refusals.items():
        if refusal is None:
            if maker is StagedGlooCommunicators and not name:
                _warn_of_host(device, reasons)
            return maker
    raise ContractError(VARIABLE, f"no process groups for {device}: {reasons}")


@functools.cache
def _warn_of_host(device: torch.device, reasons: str) -> None:
    """Log once that a job is slower than its devices, and why."""
    _log.warning("tensors of %s are exchanged through the host (staged): %s", device, reasons)
