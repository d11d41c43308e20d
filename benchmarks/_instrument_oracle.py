"""What recorded loops allow: the best test there is, on ranks of which one is slowed.

In the recording of a loop whose ranks are healthy each rank's device is slowed from each of many
steps on: its passes take longer by what the emulated device takes longer for their documents. The
oracle is told the rank, the onset, what every pass takes longer, and from the whole recording the
rank's usual time beyond its device's and how that scatters. It takes the likelihood ratio of slow
against healthy, for noise as heavy-tailed as that of a shared machine (Student's distribution with
four degrees of freedom), and names where the detector does: at one false name in 100,000 steps of
a device.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from resihp.contracts import Op
from resihp.offline import read_trace
from resihp.testing.ordinary_loops import LAYERS, work_ms

_NAME_AT = np.log(100_000)
_FREEDOM = 4.0
_TO_SCALE = 1.0 / 0.7407
"""Scale of that distribution over its median absolute deviation."""
_PASSES = {"forward": (Op.FORWARD, 1.0), "backward": (Op.BACKWARD, 2.0)}
"""Records of a pass, and the time that it takes a device over that of a forward pass."""

Floats = npt.NDArray[np.float64]


def least_steps(
    recording: Path, factor: float, passes: tuple[str, ...], pace: float, onset: int
) -> float:
    """Median number of steps until the oracle names a rank; infinity if that is too many.

    recording  of healthy ranks
    passes     those in which the device is slow
    pace       of the devices
    onset      first step from which on a rank is slowed; the last one leaves half of the others
    """
    device, beyond = _times(recording, passes, pace)
    usual = np.median(beyond, axis=0)
    noise = beyond - usual
    scale = _TO_SCALE * np.median(np.abs(noise), axis=0)
    longer = (factor - 1.0) * device
    # A slow rank's time is longer than usual by its noise and what it takes longer.
    ratio = _log_density(noise / scale) - _log_density((noise + longer) / scale)
    steps, ranks = ratio.shape
    onsets = range(onset, onset + (steps - onset) // 2)
    return median(_first(ratio[at:, rank]) for at, rank in product(onsets, range(ranks)))


def _log_density(deviation: Floats) -> Floats:
    return -0.5 * (_FREEDOM + 1.0) * np.log1p(deviation**2 / _FREEDOM)


def _first(ratio: Floats) -> float:
    over = np.flatnonzero(np.cumsum(ratio) >= _NAME_AT)
    return float(over[0] + 1) if len(over) else np.inf


def _times(recording: Path, passes: tuple[str, ...], pace: float) -> tuple[Floats, Floats]:
    """Milliseconds of each step's passes, [steps, ranks]: those of the device, and those beyond."""
    trace = read_trace(recording)
    records, ranks = trace.records, len(trace.ranks)
    steps = int(records["step"].max()) + 1
    device, own = np.zeros((steps, ranks)), np.zeros((steps, ranks))
    for op, times in (_PASSES[name] for name in passes):
        some = records["op"] == op
        where = records["step"][some], np.searchsorted(trace.ranks, records["rank"][some])
        layer_ms = work_ms(records["tokens"][some], records["sum_sq_len"][some])
        np.add.at(device, where, pace * LAYERS * times * layer_ms)
        np.add.at(own, where, records["compute_ms"][some])
    return device, own - device
