"""`benchmarks.gpu` without a device: parts, their time, the watchdog, and rows on a CPU."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import _gpu_rows, gpu
from benchmarks._gpu_rows import NotRunError, Row
from benchmarks._gpu_runner import Measurement, measure
from benchmarks._resize_live import CHANGES

HERE = "tests.benchmarks.gpu_rows"
ROOT = Path(__file__).parents[2]
ABSENT = ("lightgbm", "fastapi", "redis", "pandas", "sklearn", "pyarrow", "uvicorn", "pydantic")


def test_a_measurement_that_fails_costs_its_own_rows_alone() -> None:
    rows = measure(
        [
            Measurement("failing", f"{HERE}:failing"),
            Measurement("impossible", f"{HERE}:impossible"),
            Measurement("good", f"{HERE}:good", {"value": 1.0}),
        ],
        600,
    )
    assert [row.name for row in rows] == ["before the failure", "failing", "impossible", "good"]
    assert rows[1].note == "failed: RuntimeError: an illegal memory access"
    assert rows[2].note == "not possible: no such device"
    assert rows[3].cells() == ("good", "1 ms", "2 ms, twice that", "0.50x")


def test_one_that_hangs_is_ended_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over once it hangs, however long it took to get there."""
    pids, wait = tmp_path / "pids", subprocess.Popen.wait

    def wait_for_hang(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        deadline = time.monotonic() + 300
        while not (pids.exists() and pids.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        return wait(process, 0.1 if timeout == 15 else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_hang)
    rows = measure([Measurement("hanging", f"{HERE}:hanging", {"pids": str(pids)}, 15)], 600)
    assert [row.name for row in rows] == ["before the hang", "hanging"]
    assert rows[1].note == "hung: ended after 15 s"
    deadline = time.monotonic() + 30
    for pid in pids.read_text().split():
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} goes on"
            time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_one_that_does_not_fit_is_not_started() -> None:
    told: list[Row] = []
    rows = measure([Measurement("long", f"{HERE}:failing", seconds=60)], 5, told.append)
    assert rows == told
    assert rows[0].note == "not run: needs 60 s, 5 s left"


def test_without_a_device_no_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu.main(["--json", str(tmp_path / "gpu.json")])
    assert capsys.readouterr().out.splitlines()[-1] == "0 parts run"
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["parts"] == {}
    assert "no CUDA device" in document["why"]


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.10.1+cu128")
    assert gpu.refusal() == "torch 2.10.1+cu128 is too old: 2.11 is needed."


def test_the_chosen_parts_run_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(number: int) -> tuple[str, object]:
        one = Measurement("good", f"{HERE}:good", {"value": float(number)})
        return f"the part {number}", lambda device, small: [one]

    monkeypatch.setattr(gpu, "PARTS", {number: part(number) for number in (1, 2, 3)})
    path = tmp_path / "gpu.json"
    gpu.main(["--rehearse", "--part", "2", "--json", str(path)])
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == ["2"]
    assert parts["2"]["rows"][0] | {"measured": 2.0, "ratio": 1.0} == parts["2"]["rows"][0]
    assert "the part 2" in capsys.readouterr().out


def test_every_measurement_names_a_function() -> None:
    """In a Python without the packages of a service and of offline analysis."""
    functions = {one.function for _, plan in gpu.PARTS.values() for one in plan("cuda", False)}
    script = (
        "import sys, importlib, json\n"
        f"sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"for one in {sorted(functions)}:\n"
        "    module, name = one.split(':')\n"
        "    assert callable(getattr(importlib.import_module(module), name))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_changes_of_layout_are_those_of_the_other_benchmark() -> None:
    assert set(gpu.CHANGES) == {change.name for change in CHANGES}


def test_tensors_of_a_device_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _gpu_nccl

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NotRunError, match="not possible: there is no CUDA device"):
        next(iter(_gpu_nccl.cycles("cuda", True, "nccl", 2, 1)))


def test_groups_of_two_ranks_on_the_cpu() -> None:
    arguments = {"device": "cpu", "small": True, "maker": "gloo", "world": 2, "times": 2}
    rows = measure([Measurement("gloo", "benchmarks._gpu_nccl:cycles", arguments, 120)], 600)
    assert {row.name: row.measured for row in rows}["gloo, 2 ranks: times without a hang"] == 2


def test_examples() -> None:
    assert doctest.testmod(_gpu_rows).failed == 0
