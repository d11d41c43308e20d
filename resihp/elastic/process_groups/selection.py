"""Choice of the communicators: by the device, or by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from resihp.contracts import ContractError

from .communicators import CPU, Communicators
from .gloo import GlooCommunicators
from .nccl import NcclCommunicators
from .reconfigure import ReconfigurableCommunicators
from .staged import StagedGlooCommunicators

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

    Raises `ContractError` for an unknown name, and where torch, NCCL or the device lack what the
    communicators need.
    """
    name = environment.get(VARIABLE, "")
    names = [maker.name for maker in _MAKERS]
    if name and name not in names:
        raise ContractError(VARIABLE, f"is {name!r}; known: {', '.join(names)}")
    refusals = {maker: maker.refusal(device) for maker in _MAKERS if not name or maker.name == name}
    for maker, refusal in refusals.items():
        if refusal is None:
            return maker
    reasons = "; ".join(f"{maker.name}: {refusal}" for maker, refusal in refusals.items())
    raise ContractError(VARIABLE, f"no process groups for {device}: {reasons}")
