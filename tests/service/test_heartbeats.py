"""Heartbeats over HTTP: of many ranks in few messages, with positions and goodbyes."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.client import Client
from resihp.contracts import (
    Cause,
    Heartbeat,
    Op,
    SensorSample,
    ServiceError,
    Status,
    TrainingPosition,
    Verdict,
    to_json,
)
from resihp.contracts.codec import WireFormat, encode
from resihp.hooks import Monitor
from resihp.testing.scenarios import Fault, steps_of
from service import Settings
from service.api.bodies import HEARTBEATS
from service.store.documents import JobMessage, MessageKind
from service.worker.adapters import load_adapters
from tests.service.conftest import Http, eventually, job_of, running


def messages(http: Http, job: str) -> int:
    text = http("GET", "/v1/metrics").data.decode()
    found = re.search(rf'resihp_messages_total{{job="{job}"}} (\d+)', text)
    assert found, text
    return int(float(found[1]))


def test_heartbeats_of_many_ranks_are_stored_together(http: Http):
    http.register(job_of("many"))
    client = Client(http.url)
    with ThreadPoolExecutor(16) as pool:
        for _ in range(4):
            list(pool.map(lambda rank: client.heartbeat("many", ranks=[rank]), range(8)))
    assert messages(http, "many") < 32


def test_the_heartbeats_of_a_host_are_one_request(http: Http):
    http.register(job_of("host"))
    beats = [Heartbeat(ranks=(rank,), process=f"p{rank}", sequence=1) for rank in range(8)]
    assert Client(http.url).send_heartbeats("host", beats) == {"accepted": 8}
    for wrong, field in (([{"ranks": [0]}, {"ranks": [-1]}], "1.ranks.0"), ([], "at least 1")):
        answer = http("POST", "/v1/jobs/host/heartbeats", wrong)
        assert answer.status == 422
        assert field in answer.data.decode()


JSON = {"Content-Type": "application/json"}
POSITIONS = st.builds(
    TrainingPosition,
    step=st.integers(0, 2**40),
    microbatch=st.integers(-1, 2**20),
    op=st.none() | st.sampled_from(Op),
    waiting=st.booleans(),
    passes=st.integers(0, 2**20),
    for_s=st.floats(0, 1e9),
)
BEATS = st.builds(
    Heartbeat,
    ranks=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3).map(tuple),
    process=st.text(max_size=8),
    sequence=st.integers(0, 2**62),
    step=st.none() | st.integers(-1, 2**40),
    position=st.none() | POSITIONS,
    sensors=st.none() | st.builds(SensorSample, seconds=st.floats(0.1, 1e6), busy=st.floats(0, 1)),
    left=st.booleans(),
    error=st.text(max_size=8),
    stack=st.lists(st.text(max_size=8), max_size=2).map(tuple),
    collective=st.text(max_size=8),
)


@given(st.lists(BEATS, min_size=1, max_size=3), st.booleans())
def test_workers_read_what_senders_have_sent(beats: list[Heartbeat], leave_out_defaults: bool):
    """What the API has checked is stored as it came, and read without a second check."""
    documents = [to_json(beat) for beat in beats]
    if leave_out_defaults:
        defaults = to_json(Heartbeat(ranks=())) | {"ranks": None}
        documents = [
            {name: value for name, value in d.items() if value != defaults[name]} for d in documents
        ]
    sent = json.dumps(documents)
    HEARTBEATS.validate_json(sent)
    message = JobMessage("1-0", MessageKind.HEARTBEAT, f'{{"heartbeats":{sent}}}'.encode())
    assert message.heartbeats() == beats


@pytest.mark.parametrize(
    "body",
    [
        b' [ {"ranks": [0]} ,\n{"ranks": [1, 2], "step": 3} ]\r\n ',
        b'\t{"ranks": [0, 1, 2]}\n',
        b'[{"ranks":[0]},{"ranks":[1]},{"ranks":[2]}]',
    ],
)
def test_heartbeats_may_be_written_in_any_way(http: Http, body: bytes):
    http.register(job_of("written"))
    before = messages(http, "written")
    answer = http("POST", "/v1/jobs/written/heartbeats", body=body, headers=JSON)
    assert (answer.status, answer.json()) == (202, {"accepted": 3})
    assert messages(http, "written") == before + 1


def test_an_unknown_job_is_refused(http: Http):
    with pytest.raises(ServiceError, match="no job is registered") as refused:
        Client(http.url).heartbeat("nowhere", ranks=[0])
    assert refused.value.status == 404


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"ranks": [0], "position": {"step": -1}}, "position.step"),
        ({"ranks": [0], "position": {"step": 1, "op": 6}}, "position.op"),
        ({"ranks": [0], "position": {"step": 1, "for_s": -1.0}}, "position.for_s"),
        ({"ranks": [0], "sensors": {"seconds": 1.0, "cpu_steal": -0.1}}, "cpu_steal"),
        ({"ranks": [0], "sensors": {"seconds": 1.0, "power_w": 1e13}}, "power_w"),
        ({"ranks": [0], "sensors": {"seconds": 1.0, "xid": "48"}}, "sensors.xid"),
        ({"ranks": [0], "sensors": {"seconds": 1.0, "smell": 1.0}}, "sensors.smell"),
        ({"ranks": [0], "sensors": {"seconds": 0.0}}, "seconds"),
        ({"ranks": [0], "sensors": {"cpu_steal": 0.1}}, "sensors.seconds"),
        ({"ranks": [0], "sequence": -1}, "sequence"),
        ({"ranks": [0], "left": 1}, "left"),
        ({"ranks": [0], "mood": "fine"}, "mood"),
        ({"ranks": [0], "stack": ["frame"] * 33}, "stack"),
        ({"ranks": [0], "stack": ["f" * 257]}, "stack.0"),
        ({"ranks": [0], "collective": "c" * 257}, "collective"),
    ],
)
def test_what_is_wrong_with_a_heartbeat_is_named(http: Http, document, field):
    http.register(job_of("wrong"))
    answer = http("POST", "/v1/jobs/wrong/heartbeats", document)
    assert answer.status == 422
    assert field in answer.data.decode()


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A sidecar with the real detector."""
    settings = Settings(redis_url=None, data=tmp_path_factory.mktemp("real"), commit_every_s=0.05)
    with running(settings, load_adapters) as http:
        yield http


HUNG = TrainingPosition(step=5, op=Op.BACKWARD, microbatch=2, passes=5, for_s=40.0)
WAITING = TrainingPosition(step=5, op=Op.COLLECTIVE, waiting=True, passes=8, for_s=40.0)


class HangingJob:
    """A job of eight ranks that wait for rank 3; all send heartbeats."""

    def __init__(self, http: Http, name: str) -> None:
        http.register(job_of(name))
        self.client, self.name, self.sequence = Client(http.url), name, 0
        self.beat(dict.fromkeys(range(8), TrainingPosition(step=0)))

    def beat(self, positions: dict[int, TrainingPosition] | None = None, **more) -> set[int]:
        """A heartbeat of each rank; the ranks that are asked for their stacks."""
        self.sequence += 1
        places = positions or {rank: HUNG if rank == 3 else WAITING for rank in range(8)}

        beats = [
            Heartbeat(
                ranks=(rank,), process=f"p{rank}", sequence=self.sequence, position=place, **more
            )
            for rank, place in places.items()
        ]
        half = (len(beats) + 1) // 2  # of one host as a list, of another host each by itself
        asked = set(self.client.send_heartbeats(self.name, beats[:half]).get("stacks", []))
        with ThreadPoolExecutor(8) as pool:
            send = partial(self.client.send_heartbeat, self.name)
            answers = zip(beats[half:], pool.map(send, beats[half:]), strict=True)
        return asked | {beat.ranks[0] for beat, answer in answers if answer.get("stack")}

    def verdict(self, status: Status) -> Verdict:
        """The verdict of this status, once there is one."""

        def found() -> Verdict | None:
            self.beat()
            verdicts = self.client.verdicts(self.name)
            return next((verdict for verdict in verdicts if verdict.status is status), None)

        return eventually(found)


def test_a_position_makes_a_hang_known_at_once_and_a_goodbye_with_an_error_a_failure(real: Http):
    job = HangingJob(real, "places")
    verdict = job.verdict(Status.SUSPECT)
    assert verdict.rank == 3
    assert "in backward of step 5, microbatch 2 for 4" in verdict.evidence[0]
    assert verdict.evidence[1] == "7 other ranks wait in a collective of the same step"
    job.beat({6: WAITING}, left=True, error="ValueError: bad batch")
    failed = eventually(
        lambda: [v for v in job.client.verdicts("places") if v.status is Status.FAIL_STOP]
    )
    assert [(v.rank, v.evidence) for v in failed] == [
        (6, ("its process ended with ValueError: bad batch",))
    ]


def test_the_sensors_of_a_slow_rank_tell_why(real: Http):
    job = job_of("why")
    real.register(job)
    client = Client(real.url)
    faults = [Fault(rank=3, factor=1.6, from_step=20)]
    for batch in steps_of(job, [256, 900, 2000], steps=50, seed=1, faults=faults):
        step = int(batch.step[0])
        client.send_telemetry("why", encode(batch), WireFormat.MSGPACK)
        for ranks in ((0, 1, 2, 4, 5, 6, 7), (3,)) if step % 4 == 1 else ():
            held = ranks == (3,) and step >= 20
            sample = SensorSample(seconds=1.0, cpu_throttled=0.4 if held else 0.0, cpu_quota=0.5)
            process = f"p{ranks[0]}"
            beat = Heartbeat(ranks=ranks, process=process, sequence=step, step=step, sensors=sample)
            client.send_heartbeat("why", beat)
    words = "its cgroup (quota 0.5 CPUs) throttled it 40% of the time since step 20; its peers 0%"
    eventually(lambda: words in client.verdicts("why")[3].evidence)
    eventually(lambda: client.diagnosis("why").root_cause is Cause.HOST)
    assert client.verdicts("why")[3].status is Status.FAIL_SLOW


def test_the_stack_of_a_rank_that_hangs_is_asked_for_until_it_comes(real: Http):
    job = HangingJob(real, "stacks")
    assert job.verdict(Status.SUSPECT).rank == 3
    assert eventually(job.beat) == {0, 3}  # and that of one that waits for it
    job.beat(stack=("data.py:7 in read", "train.py:9 in main"), collective="all_reduce number 8")
    eventually(lambda: not job.beat())
    assert job.verdict(Status.SUSPECT).evidence[2:] == (
        "its stack, the innermost frame first: data.py:7 in read <- train.py:9 in main",
        "flight recorder of rank 3: all_reduce number 8",
        "flight recorder of rank 0: all_reduce number 8",
    )


def test_ranks_that_are_no_part_of_the_job_change_nothing(real: Http):
    real.register(job_of("strangers"))
    Client(real.url).heartbeat("strangers", ranks=range(100, 200))
    with Monitor(job="strangers", url=real.url, rank=0, interval_s=0.05) as monitor:
        monitor.record(op=Op.FORWARD, compute_ms=10.0, microbatch=0, tokens=100)
        eventually(lambda: monitor.stats.sent == 1)
    eventually(lambda: real.get("/v1/jobs/strangers")["backlog"] == 0)
    assert set(real.statuses("strangers")) <= set(range(8))
