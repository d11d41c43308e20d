"""The HTTP contract: what is taken, what is answered, what is refused and in which words."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from fakes import HEARTBEAT_TIMEOUT_S

from resihp.client import Client
from resihp.contracts import ContractError, Job, Plan, from_json, to_json
from resihp.contracts.codec import WireFormat
from resihp.contracts.job import acceptable_name
from service import Settings, create_app
from tests.service.conftest import Http, batch_of, eventually, job_of

JSON = {"Content-Type": "application/json"}


def problem_of(answer, status):
    assert answer.status == status, answer.data
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["type"].startswith("urn:resihp:problem:")
    assert document["detail"]
    return document


def test_a_job_is_registered_once_and_reset_by_other_content(http: Http):
    job = job_of("again")
    first = http("PUT", "/v1/jobs/again", to_json(job))
    assert first.status == 201
    assert from_json(Job, first.json()["job"]) == job
    assert first.json()["plan"]["version"] == 0
    http.send("again", batch_of(0, slow=(3,)))
    http.send("again", batch_of(1))
    eventually(lambda: http.get("/v1/jobs/again")["plan"]["version"] == 1)
    same = http("PUT", "/v1/jobs/again", to_json(job))
    assert same.status == 200
    assert same.json()["plan"]["version"] == 1
    other = http("PUT", "/v1/jobs/again", to_json(job_of("again", device="H100")))
    assert other.status == 201
    assert other.json()["plan"]["version"] == 0
    assert http.get("/v1/jobs/again/verdicts")["verdicts"] == []
    http.send("again", batch_of(0))
    eventually(lambda: http.records("again") == 32)


def test_a_deleted_job_is_unknown(http: Http):
    http.register(job_of("gone"))
    assert "gone" in [job["name"] for job in http.get("/v1/jobs")["jobs"]]
    assert http("DELETE", "/v1/jobs/gone").status == 204
    assert (
        "no job is registered as 'gone'" in problem_of(http("GET", "/v1/jobs/gone"), 404)["detail"]
    )
    problem_of(http.send("gone", batch_of(0)), 404)
    problem_of(http("DELETE", "/v1/jobs/gone"), 404)


@pytest.mark.parametrize("form", list(WireFormat))
def test_both_formats_lead_to_the_same_verdicts(http: Http, form: WireFormat):
    name = f"form-{form.name}"
    http.register(job_of(name))
    for step in range(4):
        answer = http.send(name, batch_of(step, slow=(5,) if step > 1 else ()), form)
        assert answer.status == 202
        accepted = answer.json()
        assert (accepted["accepted"], accepted["duplicate"]) == (32, False)
    plan = http("GET", f"/v1/jobs/{name}/plan?after=0&wait=60")
    assert plan.status == 200
    document = plan.json()
    assert document.pop("gap") == pytest.approx(0.25)
    assert 5 not in from_json(Plan, document).layout.ranks
    eventually(lambda: http.records(name) == 4 * 32)
    assert {r for r, status in http.statuses(name).items() if status == "fail_slow"} == {5}
    steps = http.get(f"/v1/jobs/{name}/steps?after=0")["steps"]
    assert [(s["step"], s["observed_ms"]) for s in steps] == [(1, 40.0), (2, 100.0)]


def test_a_retry_under_the_same_key_is_applied_once(http: Http):
    http.register(job_of("retry"))
    for _ in range(3):
        answer = http.send("retry", batch_of(0), **{"Idempotency-Key": "a"})
        assert answer.status == 202
    assert answer.json()["duplicate"] is True
    http.send("retry", batch_of(1), **{"Idempotency-Key": "b"})
    eventually(lambda: http.get("/v1/jobs/retry")["backlog"] == 0)
    assert http.records("retry") == 64


def test_a_retry_key_counts_for_the_route_on_which_it_came(http: Http):
    http.register(job_of("keys"))
    key = {"Idempotency-Key": "step-1"}
    assert http.send("keys", batch_of(1), **key).json()["duplicate"] is False
    answers = [
        http("POST", "/v1/jobs/keys/failures", {"ranks": [6], "step": 1}, headers=key).json()
        for _ in range(2)
    ]
    assert [answer["duplicate"] for answer in answers] == [False, True]
    eventually(lambda: http.statuses("keys").get(6) == "fail_stop")


def test_no_name_of_a_job_gives_it_keys_of_another(http: Http):
    """Registering `a:events` deleted the history of `a`, whose worker then failed for ever."""
    http.register(job_of("a"))
    http("POST", "/v1/jobs/a/failures", {"ranks": [6], "step": 1})
    eventually(lambda: http.get("/v1/jobs/a")["plan"]["version"] == 1)
    http.register(job_of("a:events"))
    Client(http.url).register(job_of("a%3Aevents"))
    http("POST", "/v1/jobs/a/failures", {"ranks": [5], "step": 2})
    eventually(lambda: http.get("/v1/jobs/a")["plan"]["version"] == 2)
    assert http.get("/v1/jobs/a:events")["plan"]["version"] == 0


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\n", "", "x" * 129])
def test_a_name_that_is_no_part_of_an_address_is_refused(name: str):
    with pytest.raises(ContractError, match="name"):
        job_of(name)
    assert not name or job_of(acceptable_name(name))


def test_a_retry_key_ends_with_the_registration_under_which_it_was_received(http: Http):
    key = {"Idempotency-Key": "a"}
    http.register(job_of("retried"))
    assert http.send("retried", batch_of(0), **key).json()["duplicate"] is False
    http("DELETE", "/v1/jobs/retried")
    for device in ("", "H100"):  # a successor, and a reset by other content
        http.register(job_of("retried", device=device))
        assert http.send("retried", batch_of(0), **key).json()["duplicate"] is False
        assert http.send("retried", batch_of(0), **key).json()["duplicate"] is True
        eventually(lambda: http.records("retried") == 32)


def test_a_poisonous_message_is_reported_and_the_job_goes_on(http: Http):
    http.register(job_of("poison"))
    bad = batch_of(0)
    http.send("poison", type(bad)(**{**bad.columns(), "microbatch": bad.microbatch + 666}))
    http.send("poison", batch_of(1))
    eventually(lambda: http.records("poison") == 32)
    events = read_events(http, "poison", "?replay=true", until="error")
    assert "a poisonous record" in events[-1]["data"]["detail"]


def test_a_job_that_the_detector_refuses_does_not_stop_the_others(http: Http):
    http.register(job_of("a-refused", device="refused"))
    http.register(job_of("z-fine"))
    http.send("a-refused", batch_of(0))
    http.send("z-fine", batch_of(0))
    eventually(lambda: http.records("z-fine") == 32)
    assert http.records("a-refused") == 0
    http.register(job_of("a-refused"))
    http.send("a-refused", batch_of(0))
    eventually(lambda: http.records("a-refused") == 32)


def test_a_job_whose_state_cannot_be_saved_does_not_stop_the_others(http: Http):
    """Its error dropped all jobs of the worker, again and again."""
    http.register(job_of("a-unsaved", device="never saved"))
    http.register(job_of("z-saved"))
    for step in range(20):
        http.send("a-unsaved", batch_of(step))
        http.send("z-saved", batch_of(step))
    eventually(lambda: http.records("z-saved") == 20 * 32)
    eventually(lambda: http.get("/v1/jobs/z-saved")["backlog"] == 0)
    assert http.get("/v1/jobs/a-unsaved")["backlog"] == 20  # shown perhaps, and saved never
    http.register(job_of("a-unsaved"))
    http.send("a-unsaved", batch_of(0))
    eventually(lambda: http.records("a-unsaved") == 32)


def test_a_failure_leads_to_a_plan_without_the_rank(http: Http):
    http.register(job_of("dead"))
    http.send("dead", batch_of(7))
    failure = {"ranks": [2], "step": 7, "plan_version": 0, "reported_by": 0, "detail": "gone"}
    assert http("POST", "/v1/jobs/dead/failures", failure).status == 202
    plan = http("GET", "/v1/jobs/dead/plan?after=0&wait=60").json()
    assert plan["version"] == 1
    assert plan["from_step"] == 8
    assert 2 not in [
        r for rep in plan["layout"]["replicas"] for s in rep["stages"] for r in s["ranks"]
    ]
    assert http.statuses("dead")[2] == "fail_stop"


def test_a_joiner_is_taken_note_of(http: Http):
    http.register(job_of("grows"))
    http.send("grows", batch_of(7))
    answer = http("POST", "/v1/jobs/grows/joiners", {"ranks": [8], "step": 7})
    assert answer.status == 202
    assert answer.json() == {"accepted": 1, "duplicate": False}
    assert http("POST", "/v1/jobs/grows/joiners", {"ranks": [8], "why": "x"}).status == 422
    assert http("POST", "/v1/jobs/unknown/joiners", {"ranks": [8]}).status == 404


def test_no_feasible_plan_is_told_and_kills_nothing(http: Http):
    http.register(job_of("hopeless"))
    http("POST", "/v1/jobs/hopeless/failures", {"ranks": [0, 1]})
    planning = eventually(
        lambda: (p := http.get("/v1/jobs/hopeless")["planning"])["state"] == "infeasible" and p
    )
    assert planning["constraint"] == "devices"
    assert "no device is left" in planning["detail"]
    assert http("GET", "/v1/jobs/hopeless/plan?after=0").status == 204
    http.send("hopeless", batch_of(0))
    eventually(lambda: http.records("hopeless") == 32)


def test_a_job_that_can_only_be_notified_is_shown_advice(http: Http):
    http.register(job_of("told", actions=("notify",)))
    client = Client(http.url)
    assert client.advice("told") is None
    for step in range(2):
        http.send("told", batch_of(step, slow=(3,)))
    planning = eventually(
        lambda: (p := http.get("/v1/jobs/told")["planning"])["state"] == "advised" and p
    )
    shown = http.get("/v1/jobs/told")
    assert shown["job"]["actions"] == ["notify"]
    assert shown["plan"]["version"] == 0
    assert http("GET", "/v1/jobs/told/plan?after=0").status == 204
    assert http.get("/v1/jobs/told/advice") == {"job": "told", "advice": planning["advice"]}
    advice = client.advice("told")
    assert advice is not None
    assert (advice.ranks, advice.summary) == ((3,), planning["advice"]["summary"])
    http.send("told", batch_of(2))
    eventually(lambda: client.advice("told") is None)
    assert "no job is registered" in problem_of(http("GET", "/v1/jobs/x/advice"), 404)["detail"]


def test_an_action_that_there_is_not_is_refused(http: Http):
    document = {**to_json(job_of("odd")), "actions": ["layout", "quota"]}
    problem = problem_of(http("PUT", "/v1/jobs/odd", document), 422)
    assert problem["errors"][0]["field"] == "actions[1]"
    del document["actions"]
    registered = http("PUT", "/v1/jobs/odd", document)
    assert registered.json()["job"]["actions"] == ["layout", "quotas"]


def test_heartbeats_that_stop_mean_fail_stop(http: Http):
    http.register(job_of("beats"))
    http("POST", "/v1/jobs/beats/heartbeats", {"ranks": [0, 1], "step": 0})

    beats = [time.monotonic()]

    def silent():
        http("POST", "/v1/jobs/beats/heartbeats", {"ranks": [0]})
        beats.append(time.monotonic())
        return http.statuses("beats").get(1) == "fail_stop"

    eventually(silent)
    status = http.statuses("beats").get(0)
    longest_s = max(after - before for before, after in pairwise([*beats, time.monotonic()]))
    # On a machine that held this test up for longer, rank 0 was silent too.
    if longest_s < HEARTBEAT_TIMEOUT_S / 2:
        assert status != "fail_stop"


def test_the_long_poll_waits_and_wakes(http: Http):
    http.register(job_of("poll"))
    begun = time.monotonic()
    assert http("GET", "/v1/jobs/poll/plan?after=0&wait=0.4").status == 204
    assert time.monotonic() - begun >= 0.35
    answers = []
    poll = lambda: answers.append(http("GET", "/v1/jobs/poll/plan?after=0&wait=60"))  # noqa: E731
    thread = threading.Thread(target=poll)
    thread.start()
    http("POST", "/v1/jobs/poll/failures", {"ranks": [7]})
    thread.join(120)
    assert answers[0].json()["version"] == 1
    assert http.get("/v1/jobs/poll/plan/0")["version"] == 0
    problem_of(http("GET", "/v1/jobs/poll/plan/9"), 404)


def test_acks_of_all_ranks_make_a_plan_active(http: Http):
    http.register(job_of("acks"))
    http("POST", "/v1/jobs/acks/failures", {"ranks": [7]})
    assert http("GET", "/v1/jobs/acks/plan?after=0&wait=60").status == 200
    for rank in range(7):
        assert http.get("/v1/jobs/acks")["rollout"]["active"] == 0
        ack = {"rank": rank, "step": 3, "state": "applied", "detail": "", "pause_ms": 1.5}
        assert http("POST", "/v1/jobs/acks/plan/1/ack", ack).status == 202
    eventually(lambda: http.get("/v1/jobs/acks")["rollout"]["active"] == 1)
    (reaction,) = http.get("/v1/jobs/acks/reactions")["reactions"]
    assert (reaction["version"], reaction["ranks"]) == (1, [7])
    seconds = reaction["seconds"]["apply"]
    metric = f'resihp_reaction_seconds{{job="acks",part="apply"}} {seconds}'
    assert metric in http("GET", "/metrics").data.decode().splitlines()
    problem_of(http("POST", "/v1/jobs/acks/plan/5/ack", ack), 404)


def test_records_of_a_new_plan_make_it_active(http: Http):
    http.register(job_of("seen"))
    http("POST", "/v1/jobs/seen/failures", {"ranks": [7]})
    assert http("GET", "/v1/jobs/seen/plan?after=0&wait=60").status == 200
    http.send("seen", batch_of(3, plan_version=1))
    eventually(lambda: http.get("/v1/jobs/seen")["rollout"]["active"] == 1)


def read_events(http: Http, job: str, query: str = "", *, until: str, **headers: str):
    """Events of a job up to the first of a kind, as {id, event, data}."""
    answer = http("GET", f"/v1/jobs/{job}/events{query}", headers=headers, preload_content=False)
    events, current, buffer = [], {}, b""
    try:
        while not events or events[-1].get("event") != until:
            chunk = answer.read1(65536)
            assert chunk, "the stream ended"
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                name, _, value = line.decode().partition(": ")
                if name in {"id", "event"}:
                    current[name] = value
                elif name == "data":
                    current["data"] = json.loads(value)
                elif not name and "data" in current:
                    events.append(current)
                    current = {}
                    if events[-1]["event"] == until:
                        break
    finally:
        answer.close()
    return events


def test_events_can_be_replayed_and_resumed(http: Http):
    http.register(job_of("sse"))
    for step in range(3):
        http.send("sse", batch_of(step, slow=(1,) if step == 2 else ()))
    events = read_events(http, "sse", "?replay=true", until="plan")
    assert events[0]["event"] == "registered"
    assert {"verdict", "plan"} <= {event["event"] for event in events}
    first_verdict = next(event for event in events if event["event"] == "verdict")
    again = read_events(http, "sse", until="plan", **{"Last-Event-ID": first_verdict["id"]})
    assert [e["data"] for e in again if e["event"] != "step"] == [
        e["data"] for e in events[events.index(first_verdict) + 1 :] if e["event"] != "step"
    ]
    bad = http("GET", "/v1/jobs/sse/events", headers={"Last-Event-ID": "x"})
    assert problem_of(bad, 422)["errors"][0]["field"] == "Last-Event-ID"


@pytest.mark.parametrize(
    ("method", "path", "document", "status", "field"),
    [
        ("PUT", "/v1/jobs/x", {"name": "y"}, 422, "layout"),
        ("PUT", "/v1/jobs/x", {**to_json(job_of("x")), "microbatchez": 1}, 422, "microbatchez"),
        ("PUT", "/v1/jobs/x", to_json(job_of("y")), 422, "name"),
        ("POST", "/v1/jobs/bad/telemetry", {"version": 2, "columns": {}}, 422, "version"),
        ("POST", "/v1/jobs/bad/telemetry", {"version": 1, "columns": {}}, 422, "columns.rank"),
        ("POST", "/v1/jobs/bad/heartbeats", {"ranks": []}, 422, "ranks"),
        ("POST", "/v1/jobs/bad/heartbeats", {"ranks": [-1]}, 422, "ranks.0"),
        ("POST", "/v1/jobs/bad/failures", {"ranks": [0], "why": "x"}, 422, "why"),
        ("POST", "/v1/jobs/bad/plan/0/ack", {"rank": 0, "state": "maybe"}, 422, "state"),
        ("GET", "/v1/jobs/bad/plan?after=x", None, 422, "query.after"),
        ("GET", "/v1/jobs/bad/steps?limit=0", None, 422, "query.limit"),
    ],
)
def test_what_is_wrong_is_named(http: Http, method, path, document, status, field):
    http.register(job_of("bad"))
    errors = problem_of(http(method, path, document), status)["errors"]
    assert field in [error["field"] for error in errors]


def test_every_error_is_a_problem_document(http: Http):
    http.register(job_of("errors"))
    problem_of(http("GET", "/nowhere"), 404)
    problem_of(http("GET", "/assets/dashboard/nothing.js"), 404)
    allow = http("PATCH", "/v1/jobs/errors")
    problem_of(allow, 405)
    text = {"Content-Type": "text/plain"}
    problem_of(http("POST", "/v1/jobs/errors/telemetry", body=b"x", headers=text), 415)
    problem_of(http("PUT", "/v1/jobs/errors", body=b"{}", headers=text), 415)
    packed = {**JSON, "Content-Encoding": "gzip"}
    problem_of(http("POST", "/v1/jobs/errors/telemetry", body=b"x", headers=packed), 415)
    problem_of(http("PUT", "/v1/jobs/errors", body=b"{", headers=JSON), 422)
    problem_of(http("POST", "/v1/jobs/errors/heartbeats", body=b"[", headers=JSON), 422)


def test_nothing_is_loaded_from_the_net(http: Http):
    for path in ("/docs", "/", "/dashboard"):
        page = http("GET", path)
        assert page.status == 200
        assert b"http://" not in page.data.replace(b"http://www.w3.org", b"")
        assert b"https://" not in page.data
    script = http("GET", "/assets/swagger/swagger-ui-bundle.js")
    assert script.status == 200
    assert script.headers["Cache-Control"] == "no-cache"  # those of a newer version are taken
    assert len(script.data) > 100_000
    paths = http.get("/openapi.json")["paths"]
    assert {"/v1/jobs/{job}/telemetry", "/v1/jobs/{job}/plan", "/v1/healthz"} <= set(paths)


def references(part: Any) -> Iterator[str]:
    """All `$ref` of a part of a document."""
    for key, value in part.items() if isinstance(part, dict) else ():
        yield from [value] if key == "$ref" else references(value)
    for value in part if isinstance(part, list) else ():
        yield from references(value)


def test_schemas_of_the_documentation_can_be_found(tmp_path):
    for _ in range(2):  # the apps of a process share the routes
        document = create_app(Settings(data=tmp_path)).openapi()
        found = set(references(document))
        assert {f"#/components/schemas/{name}" for name in ("Layout", "Stage", "Links")} <= found
        for reference in found:
            part = document
            for name in reference.removeprefix("#/").split("/"):
                part = part[name]
            assert part
        assert "security" not in document


def test_the_documentation_asks_for_the_token_where_one_is_set(tmp_path):
    document = create_app(Settings(data=tmp_path, token="secret")).openapi()
    schemes = document["components"]["securitySchemes"]
    assert schemes == {"token": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"token": []}]
    assert document["paths"]["/v1/livez"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/jobs"]["get"]


def test_health_and_metrics(http: Http):
    http.register(job_of("metrics"))
    http.send("metrics", batch_of(0, slow=(3,), dropped=5))
    eventually(lambda: http.records("metrics") == 32)
    for path in ("/healthz", "/v1/healthz"):
        eventually(lambda path=path: http.get(path) == {"status": "ok", "lag_s": 0.0})
    for path in ("/metrics", "/v1/metrics"):
        lines = http("GET", path).data.decode().splitlines()
        assert 'resihp_records_total{job="metrics"} 32.0' in lines
        assert 'resihp_dropped_total{job="metrics"} 5.0' in lines
        assert 'resihp_applied_records_total{job="metrics"} 32.0' in lines
        assert 'resihp_devices{job="metrics",status="fail_slow"} 1.0' in lines
        assert 'resihp_backlog{job="metrics"} 0.0' in lines
