"""Reads: by pages, and only what has changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resihp.client import Client
from resihp.contracts import TelemetryBatch
from service.api.lag import JobLags
from tests.service.conftest import Http, batch_of, eventually, job_of

READS = ("", "/verdicts", "/diagnosis", "/steps", "/plan", "/plan/0", "/advice")


def settled(http: Http, name: str, steps: int = 3) -> None:
    """A job with some steps, all of them in a saved state with a diagnosis.

    They come in one message: of steps that are applied later there is another diagnosis after a
    while.
    """
    http.register(job_of(name))
    http.send(name, TelemetryBatch.concat([batch_of(step) for step in range(steps)]))
    eventually(lambda: http.get(f"/v1/jobs/{name}")["backlog"] == 0)
    eventually(lambda: http.get(f"/v1/jobs/{name}/diagnosis")["slowdown"] == 1.25)


def again(http: Http, path: str, tag: str) -> Any:
    return http("GET", path, headers={"If-None-Match": tag})


@pytest.mark.parametrize("read", READS)
def test_what_is_unchanged_is_not_sent_again(
    http: Http, read: str, monkeypatch: pytest.MonkeyPatch
):
    async def none(self: JobLags, *jobs: str) -> list[float]:
        """A machine that holds the sidecar up for a second would change what is read."""
        return [0.0] * len(jobs)

    monkeypatch.setattr(JobLags, "of", none)
    name = f"known-{READS.index(read)}"
    settled(http, name)
    path = f"/v1/jobs/{name}{read}"
    first = http("GET", path)
    assert first.headers["Cache-Control"] == "no-cache"
    for tag in (first.headers["ETag"], f'"other", W/{first.headers["ETag"]}'):
        unchanged = again(http, path, tag)
        assert (unchanged.status, unchanged.data) == (304, b"")
        assert unchanged.headers["ETag"] == first.headers["ETag"]
    assert again(http, path, '"other"').data == first.data


@pytest.mark.parametrize("read", READS)
def test_what_has_changed_is_sent(http: Http, read: str):
    name = f"changed-{READS.index(read)}"
    settled(http, name)
    path = f"/v1/jobs/{name}{read}"
    first = http("GET", path)
    for step in (3, 4):
        http.send(name, batch_of(step))
    http("POST", f"/v1/jobs/{name}/failures", {"ranks": [7]})
    answer = eventually(lambda: (r := again(http, path, first.headers["ETag"])).status == 200 and r)
    if read not in {"/plan/0", "/diagnosis", "/advice"}:  # these are as they were, made anew
        eventually(lambda: http("GET", path).data != first.data)
    assert answer.headers["ETag"] != first.headers["ETag"]


def test_the_tag_of_another_job_of_the_name_is_not_known(http: Http):
    settled(http, "twice")
    path = "/v1/jobs/twice/verdicts"
    tag = http("GET", path).headers["ETag"]
    assert http("DELETE", "/v1/jobs/twice").status == 204
    assert again(http, path, tag).status == 404
    settled(http, "twice")
    assert again(http, path, tag).status == 200


def test_verdicts_by_pages(http: Http):
    settled(http, "paged")
    whole = http.get("/v1/jobs/paged/verdicts")
    assert [verdict["rank"] for verdict in whole["verdicts"]] == list(range(8))
    assert set(whole) == {"job", "verdicts"}
    found, query = [], "limit=3"
    for more in (2, 5, None):
        page = http.get(f"/v1/jobs/paged/verdicts?{query}")
        assert page.get("next") == more
        found += page["verdicts"]
        query = f"limit=3&after={more}"
    assert found == whole["verdicts"]
    assert http.get("/v1/jobs/paged/verdicts?after=7&limit=1")["verdicts"] == []
    for wrong in ("limit=0", "limit=131073", "after=-2"):
        assert http("GET", f"/v1/jobs/paged/verdicts?{wrong}").status == 422


def test_jobs_by_pages(http: Http):
    names = [f"p{number}" for number in range(5)]
    for name in names:
        http.register(job_of(name))
    whole = http.get("/v1/jobs")
    assert "next" not in whole
    found = [job for job in whole["jobs"] if job["name"] in names]
    assert [job["name"] for job in found] == names
    assert all(set(job) == {"name", "last_step", "devices", "rollout"} for job in found)
    page = http.get("/v1/jobs?after=p0&limit=2")
    assert [job["name"] for job in page["jobs"]] == ["p1", "p2"]
    assert page["next"] == "p2"
    own = "/v1/jobs?after=p0&limit=2"  # without jobs that other tests still change
    assert again(http, own, http("GET", own).headers["ETag"]).status == 304


def test_a_client_that_polls_is_not_sent_the_same_again(http: Http):
    settled(http, "polled")
    client = Client(http.url)
    statuses = []

    class Pool:
        """Requests as they are; the status of each answer is kept."""

        def __init__(self, pool: Any) -> None:
            self.pool, self.clear = pool, pool.clear

        def request(self, *given: Any, **more: Any) -> Any:
            answer = self.pool.request(*given, **more)
            statuses.append(answer.status)
            return answer

    first = client.verdicts("polled")
    client._pool = Pool(client._pool)
    assert client.verdicts("polled") == first
    plan = client.plan("polled")
    assert client.plan("polled") == plan
    assert statuses == [304, 200, 304]  # 304 has no body
    http("POST", "/v1/jobs/polled/failures", {"ranks": [7]})
    eventually(lambda: client.verdicts("polled")[7].status == "fail_stop")
    assert json.loads(http("GET", "/v1/jobs/polled/verdicts").data)["job"] == "polled"
    client.close()
