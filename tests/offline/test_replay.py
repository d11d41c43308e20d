"""`resihp replay`: past a detector of its own and through a sidecar."""

import pytest
from typer.testing import CliRunner

import resihp.client
from detector import Detector
from resihp.cli import _analyze, _replay  # noqa: F401 - the first registers a command
from resihp.cli._app import app
from resihp.contracts import Job, Layout, ServiceError, Status, Verdict
from resihp.contracts.codec import decode
from resihp.offline import read_trace, write_trace
from resihp.testing.scenarios import steps_of


class Sidecar:
    """Stands in for the client of a sidecar, which judges at once."""

    def __init__(self, url, token=None):
        self.url = url
        self.detectors = {}

    def register(self, job):
        self.detectors.setdefault(job.name, Detector(job))

    def delete(self, job):
        if self.detectors.pop(job, None) is None:
            raise ServiceError("no such job", status=404)

    def send_telemetry(self, job, message, form):
        self.detectors[job].update(decode(message, form))

    def verdicts(self, job):
        return self.detectors[job].verdicts()

    def close(self):
        self.url = None


class Silent(Sidecar):
    def delete(self, job):
        raise ServiceError("no answer")


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_verdicts_are_printed_as_they_change(slow_trace):
    result = run(slow_trace)
    assert result.exit_code == 0
    assert "rank 8 fail_slow 1.5" in result.stdout
    assert "24 steps replayed: rank 8 is fail_slow (1.5" in result.stdout


@pytest.mark.parametrize("rate", [0, 1000])
def test_a_sidecar_comes_to_the_same_verdicts(slow_trace, monkeypatch, rate):
    monkeypatch.setattr(resihp.client, "Client", Sidecar)
    result = run(slow_trace, "--url", "http://sidecar", "--rate", rate)
    assert result.exit_code == 0
    assert "rank 8 fail_slow 1.5" in result.stdout
    assert "rank 8 is fail_slow" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("where", [(), ("--url", "http://sidecar")])
def test_ranks_whose_records_end_early_are_named(tmp_path, monkeypatch, where):
    monkeypatch.setattr(resihp.client, "Client", Sidecar)
    monkeypatch.setattr(_replay, "_PATIENCE_S", 0.0)
    job = Job(name="ended", layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
    batches = [
        batch.select((batch.rank != 3) | (batch.step < 18))
        for batch in steps_of(job, [500], steps=20, seed=1)
    ]
    write_trace(tmp_path / "ended.parquet", job, batches)
    last = run(tmp_path / "ended.parquet", *where).stdout.splitlines()[-1]
    assert last == "20 steps replayed: rank 3 has no records after step 17; 7 ranks healthy"


def test_what_cannot_be_read_or_reached_is_status_2_and_one_line(slow_trace, tmp_path, monkeypatch):
    monkeypatch.setattr(resihp.client, "Client", Silent)
    for result in (run(tmp_path / "gone"), run(slow_trace, "--url", "http://sidecar")):
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_sidecar_without_a_worker_is_no_verdict(slow_trace, monkeypatch):
    class Idle(Sidecar):
        def send_telemetry(self, job, message, form):
            pass

    monkeypatch.setattr(resihp.client, "Client", Idle)
    monkeypatch.setattr(_replay, "_PATIENCE_S", 0.0)
    result = run(slow_trace, "--url", "http://sidecar")
    assert result.exit_code == 2
    assert "http://sidecar accepted all steps and has no verdicts" in result.stderr


def test_a_job_is_replayed_beside_the_one_that_may_run(slow_trace, monkeypatch):
    names = []

    class Noting(Sidecar):
        def register(self, job):
            names.append(job.name)
            super().register(job)

    monkeypatch.setattr(resihp.client, "Client", Noting)
    assert run(slow_trace, "--url", "http://sidecar").exit_code == 0
    assert names == [f"{read_trace(slow_trace).job.name} (replay)"]


def test_a_second_recording_of_a_job_is_judged_afresh(slow_trace, tmp_path, monkeypatch):
    class Late(Sidecar):
        """Judges after it was asked."""

        def __init__(self, url):
            super().__init__(url)
            self.waiting = []

        def send_telemetry(self, job, message, form):
            self.waiting.append((job, message, form))

        def verdicts(self, job):
            known = super().verdicts(job)
            while self.waiting:
                super().send_telemetry(*self.waiting.pop(0))
            return known

    sidecar = Late("http://sidecar")
    monkeypatch.setattr(resihp.client, "Client", lambda url, token: sidecar)
    monkeypatch.setattr(_replay, "_POLL_S", 0.0)
    assert "rank 8 is fail_slow" in run(slow_trace, "--url", "http://sidecar").stdout
    job = read_trace(slow_trace).job
    write_trace(tmp_path / "again.parquet", job, steps_of(job, [500], steps=24, seed=1))
    result = run(tmp_path / "again.parquet", "--url", "http://sidecar")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "24 steps replayed: all ranks are healthy"


def test_the_summary_names_ranks_with_their_status():
    verdicts = [Verdict(rank=rank, status=Status.HEALTHY) for rank in range(1, 7)]
    slow = Verdict(rank=0, status=Status.FAIL_SLOW, slowdown=1.5)
    lost = [Verdict(rank=rank, status=Status.FAIL_STOP) for rank in (8, 7)]
    assert _replay.summary(verdicts) == "all ranks are healthy"
    assert _replay.summary([*verdicts, slow]) == "rank 0 is fail_slow (1.50x); 6 ranks healthy"
    assert _replay.summary([slow, *lost]).startswith("ranks 7 and 8 are fail_stop; rank 0 is fail")
