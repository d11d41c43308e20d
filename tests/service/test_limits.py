"""Each limit has its own clear error; a token is wanted where one is set."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import batch_of, eventually, job_of, running
from pydantic import ValidationError
from test_api import JSON, problem_of

from detector import Detector, DetectorSettings
from resihp.contracts import to_json
from service import Settings
from service.worker.adapters import load_adapters


def settings_of(tmp_path, **more):
    return Settings(redis_url=None, data=tmp_path, commit_every_s=0.05, **more)


def test_sizes_and_numbers_are_limited(tmp_path):
    limits = {"max_body_bytes": 20_000, "max_records": 100, "max_jobs": 2, "max_watchers": 1}
    with running(settings_of(tmp_path, **limits)) as http:
        http.register(job_of("a"))
        http.register(job_of("b"))
        problem = problem_of(http("PUT", "/v1/jobs/c", to_json(job_of("c"))), 429)
        assert problem["type"].endswith("too-many-jobs")
        path = "/v1/jobs/a/telemetry"
        problem_of(http("POST", path, body=b"x" * 20_001, headers=JSON), 413)
        chunks = (b" " * 7_000 for _ in range(4))
        chunked = http("POST", path, body=chunks, headers=JSON, chunked=True)
        assert "20000 bytes" in problem_of(chunked, 413)["detail"]
        many = type(batch_of(0)).concat([batch_of(step) for step in range(4)])
        assert "100 records" in problem_of(http.send("a", many), 422)["detail"]
        watching = http("GET", "/v1/jobs/a/events", preload_content=False)
        assert watching.read1(16)
        full = problem_of(http("GET", "/v1/jobs/a/plan?after=0&wait=5"), 429)
        assert full["type"].endswith("too-many-watchers")
        problem_of(http("GET", "/v1/jobs/a/events"), 429)
        watching.close()


def test_a_full_backlog_refuses_telemetry_but_not_failures(tmp_path):
    with running(settings_of(tmp_path, max_backlog=5, worker=False)) as http:
        http.register(job_of("a"))
        for step in range(5):
            assert http.send("a", batch_of(step)).status == 202
        refused = http.send("a", batch_of(5))
        assert problem_of(refused, 429)["type"].endswith("backlog-full")
        assert refused.headers["retry-after"] == "1"
        assert http("POST", "/v1/jobs/a/failures", {"ranks": [1]}).status == 202
        assert 'resihp_refused_total{job="a"} 1.0' in http("GET", "/metrics").data.decode()


def test_a_backlog_is_limited_in_bytes_too(tmp_path):
    with running(settings_of(tmp_path, max_backlog_bytes=5_000, worker=False)) as http:
        http.register(job_of("a"))
        statuses = [http.send("a", batch_of(step)).status for step in range(4)]
        assert statuses[0] == 202
        assert statuses[-1] == 429


def test_a_token_is_wanted_where_one_is_set(tmp_path):
    with running(settings_of(tmp_path, token="secret")) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = http("GET", "/v1/jobs", headers=headers)
            problem_of(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} secret"}
            assert http("GET", "/v1/jobs", headers=headers).status == 200
        for path in ("/", "/healthz", "/docs", "/openapi.json", "/assets/swagger/swagger-ui.css"):
            assert http("GET", path).status == 200


def test_without_a_token_only_local_names_are_served(tmp_path):
    with running(settings_of(tmp_path)) as http:
        problem_of(http("GET", "/v1/jobs", headers={"Host": "evil.example"}), 421)
        assert http("GET", "/v1/jobs", headers={"Host": "localhost:8700"}).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_public_address_needs_a_token(host):
    with pytest.raises(ValidationError, match="bearer token"):
        Settings(host=host, token=None)
    assert Settings(host=host, token="secret").host == host


def test_the_environment_sets_and_options_override(monkeypatch):
    monkeypatch.setenv("RESIHP_PORT", "9001")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("RESIHP_MAX_JOBS", "3")
    settings = Settings(port=9002)
    assert (settings.port, settings.max_jobs) == (9002, 3)
    assert settings.redis_url == "redis://elsewhere"


def test_two_jobs_do_not_mix(tmp_path):
    with running(settings_of(tmp_path)) as http:
        for name in ("a", "b:messages"):
            http.register(job_of(name))
        http.send("a", batch_of(0, slow=(1,)))
        http.send("b:messages", batch_of(0, slow=(2,)))
        http.send("b:messages", batch_of(1, slow=(2,)))
        eventually(lambda: http.records("a") == 32 and http.records("b:messages") == 64)
        assert http.statuses("a")[2] == "healthy"
        assert http.statuses("b:messages")[2] == "fail_slow"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "set a bearer token"),
        (["--redis", "redis://127.0.0.1:1"], "cannot reach Redis"),
        (["--redis", "db:6379"], "not a Redis URL: db:6379"),
        (["--port", "70000"], "port"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, arguments, words):
    command = [sys.executable, "-m", "resihp.cli", "serve", "--data", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("resihp: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_thresholds_of_the_detector_are_settings(monkeypatch):
    monkeypatch.setenv("RESIHP_MIN_SLOWDOWN", "1.2")
    monkeypatch.setenv("RESIHP_FALSE_ALARM_STEPS", "9000")
    detector = load_adapters(Settings()).detector(job_of(), None)
    assert isinstance(detector, Detector)
    assert (detector.settings.min_slowdown, detector.settings.false_alarm_steps) == (1.2, 9000)
    assert detector.settings.confirm_steps == DetectorSettings().confirm_steps


def test_each_setting_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    documented = {name.removeprefix("RESIHP_").lower() for name in re.findall(r"`([A-Z_]+)`", page)}
    assert set(Settings.model_fields) - {"redis_url"} <= documented
    assert "redis_url" in documented


def test_documented_thresholds_are_the_detectors_defaults():
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    defaults = DetectorSettings()
    for name, value in {
        "MIN_SLOWDOWN": defaults.min_slowdown,
        "FALSE_ALARM_STEPS": defaults.false_alarm_steps,
        "CONFIRM_STEPS": defaults.confirm_steps,
        "RECOVER_STEPS": defaults.recover_steps,
        "PROBES_PER_MINUTE": defaults.probes_per_minute,
        "PROBATION_PROBE_S": defaults.probation_probe_s,
    }.items():
        assert f"| `RESIHP_{name}` | {value:,g} |" in page, name
