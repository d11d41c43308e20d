"""Whatever its bytes, a request takes little memory: what it holds is counted before it is made."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from resihp.contracts import COLUMNS, ContractError, Job, Layout, TelemetryBatch, from_json, to_json
from resihp.contracts.codec import WireFormat, decode, encode
from resihp.contracts.json_size import parse_json
from service import Settings, Sidecar
from service.api import bodies
from service.api.bodies import DOCUMENT_SIZE
from tests.service.conftest import FAKES, Http, job_of

MOST = 200e6
LIMITS = Settings(redis_url=None)
JSON, MSGPACK = WireFormat
HEAD = b"\x82\xa7version\x01\xa7columns"


def listed(size: int, content: bytes = b"") -> bytes:
    """A list in msgpack that announces `size` elements."""
    return b"\xdd" + struct.pack(">I", size) + content


def columns_of(value: bytes) -> bytes:
    """A message in msgpack that has this value in each of its columns."""
    packed = [msgpack.packb(name) + value for name in COLUMNS]
    return HEAD + bytes([0x80 + len(packed)]) + b"".join(packed)


FULL = encode(
    TelemetryBatch(**{name: np.zeros(LIMITS.max_records, d) for name, (d, _) in COLUMNS.items()})
)


def beginnings(form: WireFormat, size: int) -> tuple[bytes, ...]:
    """Beginnings of messages with `size` things to come."""
    if form is JSON:
        lists = b"[", b'{"a":[', b'{"version":1,"columns":{"rank":[', b'{"version":'
        return b"", *lists, b'{"version":"', b'{"name":"a","layout":{"replicas":['
    length = struct.pack(">I", size)
    rank = HEAD + b"\x81\xa4rank"
    maps = b"\xdf" + length, HEAD + b"\xdf" + length
    texts = b"\x81\xdb" + length, b"\x81\xa7version\xdb" + length, rank + b"\xc6" + length
    return b"", listed(size), rank + listed(size), rank + b"\xc9" + length + b"\5", *maps, *texts


THINGS = {
    JSON: (b"[],", b"{},", b"[", b'{"":', b'{"":[]},', b"-6,", b"1e1,", b'"ab",', b"null,", b"1",
           b'"', b"\\u0001", "\U0001f600".encode()),
    MSGPACK: (b"\x80", b"\x90", b"\x91", b"\x81\x01", b"\xc0", b"\x01", b"\xce\0\1\0\0",
              b"\xcf" * 9, b"\xcb" * 9, b"\xa3abc", b"\xc4\0", b"\xc7\0\5", b"\xd6\xff\0\0\0\0"),
}  # fmt: skip


@st.composite
def messages(draw):
    """Messages that repeat one thing as often as the limits allow."""
    form = draw(st.sampled_from(WireFormat))
    size = draw(st.sampled_from([1, LIMITS.max_records - 1, LIMITS.max_body_bytes]))
    beginning = draw(st.sampled_from(beginnings(form, size)))
    thing = draw(st.sampled_from(THINGS[form]) | st.binary(min_size=1, max_size=9))
    space = LIMITS.max_body_bytes - len(beginning)
    return form, beginning + thing * min(size, space // len(thing))


def peak(work) -> int:
    """Most bytes that `work` holds at a time; it may end with a `ContractError`."""
    tracemalloc.start()
    try:
        work()
    except ContractError:
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(message=messages())
@example(message=(MSGPACK, columns_of(listed(100_000, b"\xce\0\1\0\0" * 100_000))))
@example(message=(MSGPACK, FULL))
def test_the_content_of_a_message_is_small(message):
    form, content = message
    received = 2 * len(content)  # as it came, and joined
    assert received + peak(lambda: decode(content, form, max_records=LIMITS.max_records)) < MOST
    if form is JSON:
        work = peak(lambda: from_json(Job, parse_json(content, **DOCUMENT_SIZE)))
        assert received + work < MOST


def test_as_many_records_as_are_allowed_fit():
    assert len(FULL) <= LIMITS.max_body_bytes
    assert len(decode(FULL, max_records=LIMITS.max_records)) == LIMITS.max_records


class Body:
    """A request, as far as it is read; its body lies outside of what is counted."""

    def __init__(self, form: WireFormat, content: bytes) -> None:
        self.headers = {"content-type": form.value}
        self._content = content
        decoding = ThreadPoolExecutor(1)
        context = SimpleNamespace(decoding=decoding)
        self.app = SimpleNamespace(state=SimpleNamespace(context=context))

    async def body(self) -> bytes:
        return self._content


@pytest.mark.parametrize(
    ("read", "form", "content"),
    [
        (
            lambda request: bodies.read_telemetry(request, 10**6),
            JSON,
            b'{"columns":{"rank":[' + b"-6," * 200_000 + b"0]}}",
        ),
        (
            lambda request: bodies.read(request, bodies.JoinersBody),
            JSON,
            b'{"a":"' + b"a" * 2_000_000 + b'"}',
        ),
        (
            lambda request: bodies.read(request, bodies.JoinersBody),
            JSON,
            b'{"ranks":[' + b'"a",' * 100_000 + b"0]}",
        ),
        (
            lambda request: bodies.read_job(request, "j"),
            JSON,
            b'{"layout":[' + b'"a",' * 100_000 + b"0]}",
        ),
    ],
)
def test_a_refusal_that_waits_for_the_event_loop_keeps_nothing_of_the_body(read, form, content):
    """The next body is decoded meanwhile."""
    request = Body(form, content)
    tracemalloc.start()
    try:
        with pytest.raises((ContractError, RequestValidationError)):
            asyncio.run(read(request))  # what a first call makes once and for all
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises((ContractError, RequestValidationError)) as raised:
            asyncio.run(read(request))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000, raised.value


JOB = to_json(Job(name="m", layout=Layout.grid(dp=256, pp=4, tp=4, layers=8), microbatches=256))
WORST = [
    ("POST", "telemetry", MSGPACK, columns_of(listed(10**6, b"\x80" * 10**6))),
    ("POST", "telemetry", MSGPACK, columns_of(listed(10**5, b"\xce\0\1\0\0" * 10**5))),
    ("POST", "telemetry", MSGPACK, FULL),
    ("POST", "telemetry", JSON, b'{"columns":{"rank":[' + b"-6," * 2_400_000 + b"0]}}"),
    ("POST", "telemetry", JSON, b'{"a":"' + b"a" * 16_000_000 + b'"}'),
    ("POST", "joiners", JSON, b'{"a":"' + b"a" * 8_000_000 + "\U0001f600".encode() + b'"}'),
    ("PUT", "", JSON, b'{"a":"' + b"a" * 8_000_000 + "\U0001f600".encode() + b'"}'),
    ("POST", "failures", JSON, b'{"ranks":[' + b"-6," * 1_000_000 + b"0]}"),
    ("POST", "joiners", JSON, b'{"ranks":[' + b'"a",' * 200_000 + b"0]}"),
    ("POST", "heartbeats", JSON, b"{" + b",".join(b'"%x":0' % i for i in range(170_000)) + b"}"),
    ("PUT", "plan/1", JSON, b'{"plan":{"":[' + b"[]," * 500_000 + b"0]}}"),
    ("PUT", "", JSON, json.dumps(JOB).encode()),
]  # fmt: skip


def memory(pid: int, field: str) -> int:
    """A field of /proc/PID/status, bytes: the largest of a process and its children."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    found = [0]
    for number in pids:
        status = Path(f"/proc/{number}/status").read_text()
        if "redis" not in status.splitlines()[0]:
            found.append(int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024)
    return max(found)


def test_requests_take_little_memory_also_two_at_once(tmp_path):
    with Sidecar(tmp_path, command=FAKES, options=("--no-worker",)) as sidecar:
        http = Http(sidecar.url)
        http.register(job_of("m"))
        before = memory(sidecar.pid, "VmRSS")

        def send(method: str, path: str, form: WireFormat, body: bytes) -> int:
            address = f"/v1/jobs/m/{path}".rstrip("/")
            headers = {"Content-Type": form.value}
            return http(method, address, body=body, headers=headers, timeout=200).status

        for request in WORST:
            assert send(*request) in {200, 201, 202, 422}
            assert memory(sidecar.pid, "VmHWM") - before < MOST, request[:3]
        with ThreadPoolExecutor(2) as pool:
            for request in WORST:
                list(pool.map(lambda _, request=request: send(*request), range(2)))
        assert memory(sidecar.pid, "VmHWM") - before < 1.5 * MOST
        http.close()
