"""Emulated devices, one of which turns slow: to see a verdict where every device is healthy.

Each layer sleeps in its forward and backward passes, and for longer on the slow device.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterable
from typing import Any

import torch

FORWARD_S = 12e-3
JITTER = 0.1
"""No device takes exactly as long each time."""


def option_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--slow-rank", type=int, default=-1, help="rank whose device turns slow")
    parser.add_argument("--slow-since", type=int, default=25, help="step from which it is slow")
    parser.add_argument("--factor", type=float, default=3.0, help="its slowdown")
    parser.add_argument("--folder", default="out", help="folder for the trainer's log")
    return parser


class EmulatedLayer:
    """Pace of one layer of this rank's device, which runs `microbatches` in a step."""

    def __init__(self, options: argparse.Namespace, microbatches: int) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self._factor = options.factor if rank == options.slow_rank else 1.0
        self._random = random.Random(rank)
        self._healthy_passes = options.slow_since * microbatches
        self._passes = 0

    def run(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Sleep as a forward hook, and in the backward pass twice as long."""
        seconds = FORWARD_S * (self._factor if self._passes >= self._healthy_passes else 1.0)
        seconds *= self._random.uniform(1.0 - JITTER, 1.0 + JITTER)
        time.sleep(seconds)
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        if tensor.requires_grad:  # not in evaluation
            self._passes += 1
            tensor.register_hook(lambda _: time.sleep(2 * seconds))


def pace(layers: Iterable[torch.nn.Module], options: argparse.Namespace, microbatches: int) -> None:
    """Have `layers` take the time that they would take on the emulated device of this rank."""
    for layer in layers:
        layer.register_forward_hook(EmulatedLayer(options, microbatches).run)
