"""Rows of the tables of `benchmarks.gpu`: a figure beside its limit or peer, or a reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

COLUMNS = ("", "measured", "limit or peer", "ratio")


class NotRunError(Exception):
    """Reason for which rows are not measured here, as it stands in the table."""


@dataclass(frozen=True)
class Row:
    """One figure.

    measured  None: `note` says why there is none
    limit     what the figure is compared with, in the same unit; `of` says what it is
    note      stands behind the figure, or in its place
    """

    name: str
    measured: float | None = None
    unit: str = ""
    limit: float | None = None
    of: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Figure over limit; None where one of them is missing, or the limit is 0."""
        return self.measured / self.limit if self.measured is not None and self.limit else None

    def cells(self) -> tuple[str, ...]:
        """Texts of the columns `COLUMNS`.

        >>> Row("copies", 20.0, "GB/s", 25.0, "a plain copy").cells()
        ('copies', '20 GB/s', '25 GB/s, a plain copy', '0.80x')
        """
        measured = _quantity(self.measured, self.unit)
        limit = _quantity(self.limit, self.unit)
        return (
            self.name,
            ", ".join(text for text in (measured, self.note) if text),
            ", ".join(text for text in (limit, self.of) if text) or "-",
            "-" if self.ratio is None else f"{self.ratio:.2f}x",
        )

    def to_json(self) -> dict[str, Any]:
        """Fields and ratio."""
        return {**asdict(self), "ratio": self.ratio}


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.3g} {unit}".strip() if abs(value) < 1000 else f"{value:.0f} {unit}".strip()


def need_cuda(device: str) -> None:
    """Raises `NotRunError` unless `device` is a CUDA device."""
    if device != "cuda":
        raise NotRunError(f"not run: {device} is no CUDA device")
