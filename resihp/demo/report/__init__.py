"""The report of a run: one HTML page of key figures, plots and diagrams."""

from .page import render_report, write_report

__all__ = ["render_report", "write_report"]
