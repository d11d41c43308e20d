"""What all benchmarks share: the machine, a table, a file, an environment for peers."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "numpy", "lightgbm", "redis")


def machine() -> str:
    """Processor, cores, accelerator, and the versions that matter, in one line."""
    found = [f"{name} {_version(name)}" for name in _LIBRARIES if _version(name)]
    parts = [_processor(), f"{_cores()} cores", f"Python {platform.python_version()}", *found]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.insert(2, torch.cuda.get_device_name(0))
    return ", ".join(parts)


def peer_python(folder: Path) -> Path:
    """Interpreter of a new virtual environment in `folder`, for the packages of peers; it sees
    those of this one, as torch, behind them."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    site = next((folder / "lib").glob("python*/site-packages"))
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def install(python: Path, *arguments: str, **environment: str) -> None:
    """Install packages. Raises `RuntimeError` with the last line of what pip says."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, *arguments], capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["pip failed"])[-1])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Plain text, columns aligned, the first to the left and the others to the right."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        head, *tail = zip(row, widths, strict=True)
        print("  ".join([head[0].ljust(head[1]), *(cell.rjust(width) for cell, width in tail)]))
        if number == 0:
            print("  ".join("-" * width for width in widths))


def write_json(path: str | Path, obj: Any) -> None:
    """The figures, with the machine beside them."""
    document = {"machine": machine(), **obj}
    Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
