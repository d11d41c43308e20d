"""Both wire formats carry the same batch, and refuse what is malformed by the name of its field."""

from __future__ import annotations

import json
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import COLUMNS, ContractError, Op, TelemetryBatch
from resihp.contracts.codec import VERSION, EncodedBatch, WireFormat, decode, encode
from resihp.contracts.json_size import parse_json

times = st.floats(0, 1e9)
whole = st.integers(-1, 2**53)


@st.composite
def batches(draw):
    size = draw(st.integers(0, 6))

    def column(values):
        return draw(st.lists(values, min_size=size, max_size=size))

    return TelemetryBatch(
        rank=column(st.integers(0, 2**31 - 1)),
        step=column(st.integers(0, 2**53)),
        microbatch=column(st.integers(-1, 2**31 - 1)),
        chunk=column(st.integers(0, 2**15 - 1)),
        op=column(st.sampled_from(list(Op))),
        compute_ms=column(times),
        wait_ms=column(times | st.just(float("nan"))),
        tokens=column(whole),
        sequences=column(whole),
        sum_sq_len=column(st.integers(-1, 2**63 - 1)),
        max_len=column(whole),
        peer=column(st.integers(-1, 2**31 - 1)),
        start_ms=column(st.just(float("nan")) | st.floats(-1e12, 1e12)),
        plan_version=draw(st.integers(0, 1000)),
        dropped=draw(st.integers(0, 1000)),
    )


@settings(deadline=None, max_examples=100)
@given(batch=batches(), form=st.sampled_from(WireFormat))
def test_a_batch_survives_the_wire(batch, form):
    back = decode(encode(batch, form), form)
    assert back == batch
    assert {name: column.dtype for name, column in back.columns().items()} == {
        name: dtype for name, (dtype, _) in COLUMNS.items()
    }


@settings(deadline=None, max_examples=50)
@given(batch=batches())
def test_msgpack_takes_lists_as_well_as_bytes(batch):
    document = json.loads(encode(batch, WireFormat.JSON))
    assert decode(msgpack.packb(document)) == batch


def document(**changes):
    columns = {"rank": [0, 1], "step": [5, 5], "microbatch": [0, 0], "op": [0, 1],
               "compute_ms": [1.0, 2.0]}  # fmt: skip
    columns.update(changes.pop("columns", {}))
    columns = {name: value for name, value in columns.items() if value is not ...}
    return {"version": VERSION, "columns": columns, **changes}


@pytest.mark.parametrize("form", list(WireFormat))
def test_columns_that_are_left_out_stand_for_not_known(form):
    message = document()
    batch = decode(_pack(message, form), form)
    assert np.isnan(batch.wait_ms).all()
    assert np.isnan(batch.start_ms).all()
    assert batch.tokens.tolist() == batch.peer.tolist() == [-1, -1]
    assert (batch.plan_version, batch.dropped) == (0, 0)


MALFORMED = [
    ({"version": 2}, "version"),
    ({"version": None}, "version"),
    ({"plan_version": -1}, "plan_version"),
    ({"plan_version": 1.5}, "plan_version"),
    ({"plan_version": 2**63}, "plan_version"),
    ({"dropped": True}, "dropped"),
    ({"dropped": "none"}, "dropped"),
    ({"dropped": 2**32}, "dropped"),
    ({"surprise": 1}, "surprise"),
    ({"columns": {"rank": ...}}, "columns.rank"),
    ({"columns": {"colour": [1, 2]}}, "columns.colour"),
    ({"columns": {"op": 3}}, "columns.op"),
    ({"columns": {"op": "01"}}, "columns.op"),
    ({"columns": {"op": [0, 6]}}, "op"),
    ({"columns": {"op": [0, 256]}}, "op"),
    ({"columns": {"op": [0, None]}}, "op"),
    ({"columns": {"op": [0, 1.5]}}, "op"),
    ({"columns": {"step": [0]}}, "step"),
    ({"columns": {"step": [[0], [1]]}}, "step"),
    ({"columns": {"step": [0, [1]]}}, "step"),
    ({"columns": {"step": [0, -1]}}, "step"),
    ({"columns": {"step": [0, 2**63]}}, "step"),
    ({"columns": {"step": [0, 2**53 + 1]}}, "step"),
    ({"columns": {"step": [0, []]}}, "step"),
    ({"columns": {"step": [{}, {}]}}, "step"),
    ({"columns": {"step": [True, False]}}, "step"),
    ({"columns": {"rank": [0, "one"]}}, "rank"),
    ({"columns": {"microbatch": [0, -2]}}, "microbatch"),
    ({"columns": {"compute_ms": [1, -1]}}, "compute_ms"),
    ({"columns": {"compute_ms": [1, None]}}, "compute_ms"),
    ({"columns": {"compute_ms": [1, "2"]}}, "compute_ms"),
    ({"columns": {"compute_ms": [1, {}]}}, "compute_ms"),
    ({"columns": {"compute_ms": [1, 1e300]}}, "compute_ms"),
    ({"columns": {"wait_ms": [None, -1]}}, "wait_ms"),
    ({"columns": {"wait_ms": [None, 1e300]}}, "wait_ms"),
    ({"columns": {"tokens": [-2, 0]}}, "tokens"),
    ({"columns": {"start_ms": [None, 1e300]}}, "start_ms"),
]


@pytest.mark.parametrize(("changes", "field"), MALFORMED)
@pytest.mark.parametrize("form", list(WireFormat))
def test_what_is_malformed_is_named(changes, field, form):
    with pytest.raises(ContractError) as caught:
        decode(_pack(document(**changes), form), form)
    assert caught.value.field.removeprefix("columns.") == field.removeprefix("columns.")
    assert caught.value.problem


@pytest.mark.parametrize(
    ("message", "form"),
    [
        (b"", WireFormat.JSON),
        (b"{", WireFormat.JSON),
        (b"[" * 100_000, WireFormat.JSON),
        (b"\xff\xfe{}", WireFormat.JSON),
        (b"[]", WireFormat.JSON),
        (b"null", WireFormat.JSON),
        (b'{"version": 1}', WireFormat.JSON),
        (b'{"version": 1, "columns": []}', WireFormat.JSON),
        (b"", WireFormat.MSGPACK),
        (b"\xc1", WireFormat.MSGPACK),
        (b"\x80\x80", WireFormat.MSGPACK),
        (b"\x81\x80\x01", WireFormat.MSGPACK),
        (b"\x81\x90\x01", WireFormat.MSGPACK),
        (msgpack.packb({1: 2}), WireFormat.MSGPACK),
        (b"\x91" * 100_000, WireFormat.MSGPACK),
        (b"\x81\xa7columns\x90", WireFormat.MSGPACK),
        (b"\x81\xa7columns\x81\xa4rank", WireFormat.MSGPACK),
    ],
)
def test_what_is_no_message(message, form):
    with pytest.raises(ContractError):
        decode(message, form)


@pytest.mark.parametrize("form", list(WireFormat))
def test_a_message_without_starts_is_one_that_an_older_sidecar_knows(form):
    batch = decode(_pack(document(), form), form)
    read = json.loads if form is WireFormat.JSON else msgpack.unpackb
    assert read(encode(batch, form))["columns"].keys() == COLUMNS.keys() - {"start_ms"}


@settings(deadline=None)
@given(parts=st.lists(batches(), min_size=1, max_size=4))
def test_messages_are_merged_as_their_batches_are(parts):
    parts = [replace(part, plan_version=3) for part in parts]
    encoded = [EncodedBatch.read(encode(part)) for part in parts]
    assert [len(each) for each in encoded] == [len(part) for part in parts]
    assert decode(EncodedBatch.merge(encoded)) == TelemetryBatch.concat(parts)


@pytest.mark.parametrize(
    "changed",
    [{"columns": {}}, {"columns": []}, {"plan_version": 1.5}, {"dropped": None}, {"more": 1}],
)
def test_only_what_encode_writes_is_merged(changed):
    written = msgpack.unpackb(encode(TelemetryBatch.empty()))
    with pytest.raises(ContractError):
        EncodedBatch.read(msgpack.packb({**written, **changed}))


@pytest.mark.parametrize("step", [b"\0" * 8, b"x", []])
def test_only_columns_of_one_length_are_merged(step):
    written = msgpack.unpackb(encode(TelemetryBatch.empty()))
    written["columns"]["step"] = step
    with pytest.raises(ContractError):
        EncodedBatch.read(msgpack.packb(written))


@settings(deadline=None, max_examples=200)
@given(noise=st.binary(max_size=60), form=st.sampled_from(WireFormat))
def test_noise_is_refused_and_nothing_else_happens(noise, form):
    with pytest.raises(ContractError):
        decode(noise, form)


@pytest.mark.parametrize(
    ("name", "number"), [("compute_ms", float("inf")), ("compute_ms", 10**400), ("step", 2**64)]
)
def test_numbers_beyond_any_column_are_refused(name, number):
    message = json.dumps(document(columns={name: [number, 1]})).encode()
    with pytest.raises(ContractError) as caught:
        decode(message, WireFormat.JSON)
    assert caught.value.field == name


def test_bytes_that_are_no_whole_number_of_values():
    changed = document(columns={"step": b"\0" * 9})
    with pytest.raises(ContractError, match=r"columns\.step"):
        decode(msgpack.packb(changed))


@pytest.mark.parametrize("column", [[0] * 3, b"\0" * 24])
def test_a_limit_on_records_holds_for_each_column(column):
    message = _pack(document(columns={"tokens": ...}), WireFormat.MSGPACK)
    assert len(decode(message, max_records=2)) == 2
    for limit, changes in ((1, {}), (2, {"tokens": column})):
        with pytest.raises(ContractError) as caught:
            decode(_pack(document(columns=changes), WireFormat.MSGPACK), max_records=limit)
        assert caught.value.field == "columns"


@pytest.mark.parametrize(
    "value", [[0, msgpack.ExtType(5, b"")], [0, msgpack.Timestamp(1)], [0, b"1"], [0, "x" * 10**6]]
)
def test_a_column_holds_nothing_but_numbers(value):
    with pytest.raises(ContractError, match=r"columns\.rank: must hold numbers"):
        decode(msgpack.packb(document(columns={"rank": value})))


def test_data_behind_a_message_are_refused():
    with pytest.raises(ContractError, match="data follow its end"):
        decode(_pack(document(), WireFormat.MSGPACK) + b"\xc0")


def test_a_long_name_is_not_repeated_in_full():
    for form in WireFormat:
        with pytest.raises(ContractError, match="unknown field") as caught:
            decode(_pack({"x" * 10**6: 1}, form), form)
        assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"[" + b"[]," * 10 + b"0]", "brackets"),
        (b"[" + b"1," * 9 + b"0]", "values"),
        (b"[1,", "JSON"),
    ],
)
def test_json_is_counted_before_it_is_parsed(message, words):
    with pytest.raises(ContractError, match=words):
        parse_json(message, parts=10, values=8)
    assert parse_json(b'{"a": [1, 2]}', parts=5, values=1) == {"a": [1, 2]}


def _pack(value, form):
    return json.dumps(value).encode() if form is WireFormat.JSON else msgpack.packb(value)
