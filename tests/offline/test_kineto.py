"""Profiler files: of a real CPU run, and of made-up jobs with devices."""

import gzip
import json

import numpy as np
import pytest

from resihp.contracts import Op, Status, TraceError
from resihp.offline import analyze, read_trace
from resihp.testing.cuda_profiles import LAYERS, US_PER_TOKEN, CudaJob

FORWARD_MS, BACKWARD_MS, NCCL_MS = 4.0, 8.0, 2.0


def device_events(rank, *, slow=1.0, steps=6, microbatches=2, peer=None, first=5):
    """Events as a CUDA job shows them: launches on the host, kernels later on the device."""
    events, clock, key = [], 1000.0 * rank, 0

    def annotate(name, start, stop):
        events.append(event("user_annotation", name, start, stop - start))

    def event(category, name, ts, dur, **args):
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}

    def kernel(name, launched, ms, **args):
        nonlocal key
        key += 1
        events.append(event("cuda_runtime", "cudaLaunchKernel", launched, 5, correlation=key))
        # The device runs far behind the host.
        late = launched + 50_000.0
        events.append(event("kernel", name, late, ms * 1e3, correlation=key, **args))

    for step in range(steps):
        begin = clock
        for _ in range(microbatches):
            for name, ms in (("forward_step", FORWARD_MS), ("backward_step", BACKWARD_MS)):
                start = clock
                for _ in range(2):
                    kernel("gemm", clock + 10, ms * slow / 2)
                    clock += ms * 1e3
                if peer is not None:
                    kernel("ncclDevKernel_SendRecv", clock + 10, 0.3, **{"Dst Rank": peer})
                    clock += 50.0
                annotate(name, start, clock)
        kernel("ncclDevKernel_AllReduce_Sum", clock + 10, NCCL_MS + (2.0 - slow))
        clock += 4000.0  # the optimizer waits for the sum
        annotate("Optimizer.step#AdamW.step", clock + 100, clock + 300)
        kernel("adam", clock + 150, 0.5)
        clock += 400.0
        annotate(f"ProfilerStep#{first + step}", begin, clock)
        clock += 10.0
    return events


def write(path, rank, events, **other):
    document = {"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": events, **other}
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def test_kernels_belong_to_the_pass_that_launched_them(tmp_path):
    write(tmp_path / "trace.json.gz", 3, device_events(3))
    trace = read_trace(tmp_path / "trace.json.gz")
    assert trace.format == "kineto-json"
    assert trace.ranks == (3,)
    assert trace.steps == (5, 6, 7, 8, 9, 10)
    for batch in trace.batches():
        for op, ms in ((Op.FORWARD, FORWARD_MS), (Op.BACKWARD, BACKWARD_MS)):
            rows = batch.op == op
            assert batch.microbatch[rows].tolist() == [0, 1]
            np.testing.assert_allclose(batch.compute_ms[rows], ms)
        assert batch.compute_ms[batch.op == Op.OPTIMIZER].tolist() == [0.5]
        assert int((batch.op == Op.COLLECTIVE).sum()) == 1


def test_the_rank_that_waits_least_tells_how_long_a_collective_takes(tmp_path):
    for rank in range(4):
        write(tmp_path / f"{rank}.json", rank, device_events(rank, slow=1.5 if rank == 2 else 1.0))
    trace = read_trace(tmp_path)
    assert trace.job.layout.dp == 4
    for batch in trace.batches():
        rows = batch.op == Op.COLLECTIVE
        np.testing.assert_allclose(batch.compute_ms[rows], NCCL_MS + 0.5)
        waits = dict(zip(batch.rank[rows].tolist(), batch.wait_ms[rows].tolist(), strict=True))
        assert waits == pytest.approx({0: 0.5, 1: 0.5, 2: 0.0, 3: 0.5})
    document = analyze(trace).to_json()
    # One stage and no lengths: rank 2 may as well have had more work.
    assert document["root_cause"] == "none"
    assert document["attribution"]["device"] > 0.9


def test_time_in_no_pass_is_told(tmp_path):
    """A step of 52.4 ms on the host holds 24.5 ms of work on the device and 3 of communication."""
    for rank in range(4):
        write(tmp_path / f"{rank}.json", rank, device_events(rank))
    assert analyze(read_trace(tmp_path)).to_json()["untimed_ms"] == pytest.approx(24.9)


def test_ranks_that_send_to_each_other_are_a_pipeline(tmp_path):
    for rank in range(4):
        write(tmp_path / f"{rank}.json", rank, device_events(rank, peer=(rank + 2) % 4))
    layout = read_trace(tmp_path).job.layout
    assert [replica.ranks for replica in layout.replicas] == [(0, 2), (1, 3)]


def test_a_pipeline_holds_the_rank_whose_file_is_missing(tmp_path):
    for rank in range(3):
        write(tmp_path / f"{rank}.json", rank, device_events(rank, peer=(rank + 2) % 4))
    layout = read_trace(tmp_path).job.layout
    assert [replica.ranks for replica in layout.replicas] == [(0, 2), (1, 3)]


def test_pipelines_of_unequal_lengths_are_refused(tmp_path):
    for rank, peer in ((0, 2), (1, 3), (2, 4)):
        write(tmp_path / f"{rank}.json", rank, device_events(rank, peer=peer))
    with pytest.raises(TraceError, match=r"pipelines: .* chains of 2 and 3 ranks"):
        read_trace(tmp_path)


def test_a_schedule_of_several_cycles_leaves_a_file_of_each(tmp_path):
    for rank in range(2):
        for first in (12, 5):  # steps that are not read in their order
            slow = 1.5 if rank == 1 and first == 12 else 1.0
            events = device_events(rank, slow=slow, steps=3, first=first)
            write(tmp_path / f"worker{rank}.{20 - first}.json", rank, events)
    trace = read_trace(tmp_path)
    assert trace.ranks == (0, 1)
    assert trace.steps == (5, 6, 7, 12, 13, 14)
    for batch in trace.batches():
        slow = batch.rank[(batch.op == Op.FORWARD) & (batch.compute_ms > 1.2 * FORWARD_MS)]
        assert set(slow) == ({1} if batch.step[0] >= 12 else set())
        waits = batch.wait_ms[batch.op == Op.COLLECTIVE]
        np.testing.assert_allclose(sorted(waits), [0.0, 0.5 if slow.size else 0.0])
    assert analyze(trace).to_json()["untimed_ms"] > 0


@pytest.mark.parametrize("first", [5, 7])
def test_two_files_of_the_same_steps_of_a_rank_are_refused(tmp_path, first):
    write(tmp_path / "a.json", 1, device_events(1, first=5))
    write(tmp_path / "b.json", 1, device_events(1, first=first))
    with pytest.raises(TraceError, match="2 files of rank 1 do not number different steps"):
        read_trace(tmp_path)


@pytest.mark.parametrize("name", ["worker{}.pt.trace.json", "run7_rank{}_of_12.json"])
def test_names_tell_the_ranks_of_files_that_do_not(tmp_path, name):
    for rank in range(12):
        events = device_events(rank, slow=1.5 if rank == 10 else 1.0, steps=2)
        write(tmp_path / name.format(rank), rank, events, distributedInfo={})
    records = read_trace(tmp_path).records
    passes = records["op"] == Op.FORWARD
    assert set(records["rank"]) == set(range(12))
    assert set(records["rank"][passes & (records["compute_ms"] > 1.2 * FORWARD_MS)]) == {10}


@pytest.mark.parametrize("names", [("a.json", "b.json"), ("host1_7.json", "host2_8.json")])
def test_files_that_do_not_tell_their_ranks_are_refused(tmp_path, names):
    for name in names:
        write(tmp_path / name, 0, device_events(0), distributedInfo={})
    with pytest.raises(TraceError, match=f"{names[0]}: does not tell its rank; name it rankN"):
        read_trace(tmp_path)


def test_a_trace_without_computation_is_refused(tmp_path):
    write(tmp_path / "a.json", 0, [e for e in device_events(0) if e["cat"] == "user_annotation"])
    with pytest.raises(TraceError, match="no computation"):
        read_trace(tmp_path / "a.json")


def named(trace):
    return [v.rank for v in analyze(trace).verdicts if v.status is not Status.HEALTHY]


def test_passes_that_nobody_named_are_found_on_devices(tmp_path):
    CudaJob(steps=3, seed=1).write(tmp_path)
    trace = read_trace(tmp_path)
    assert trace.job.microbatches == 2 * 4
    random = np.random.default_rng(1)
    for batch in trace.batches():
        for rank in range(4):
            for microbatch in range(2):
                tokens, speed = int(random.integers(128, 256)), random.normal(1.0, 0.01)
                rows = (batch.rank == rank) & (batch.microbatch == microbatch)
                us = LAYERS * tokens * US_PER_TOKEN * speed
                assert batch.op[rows].tolist() == [Op.FORWARD, Op.BACKWARD]
                np.testing.assert_allclose(batch.compute_ms[rows], [us * 1e-3, 2 * us * 1e-3])
                assert set(batch.tokens[rows].tolist()) == {tokens}
                assert set(batch.sum_sq_len[rows].tolist()) == {tokens**2}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_slow_device_is_named_without_marks(tmp_path, microbatches):
    CudaJob(steps=24, slow=2, microbatches=microbatches).write(tmp_path)
    assert named(read_trace(tmp_path)) == [2]
    CudaJob(steps=24, microbatches=microbatches).write(tmp_path)
    assert named(read_trace(tmp_path)) == []


@pytest.mark.parametrize(("ranks", "knows_work"), [(4, True), (6, False)])
def test_shapes_tell_the_work_where_no_other_stages_do(tmp_path, ranks, knows_work):
    CudaJob(ranks=ranks, stages=2, steps=2).write(tmp_path)
    trace = read_trace(tmp_path)
    assert (trace.job.layout.dp, trace.job.layout.pp) == (ranks // 2, 2)
    assert set(trace.records["tokens"][trace.records["op"] <= Op.BACKWARD] >= 0) == {knows_work}


@pytest.mark.parametrize("numbered", [True, False])
def test_ranks_that_recorded_other_steps_are_compared_in_those_of_all(tmp_path, numbered):
    late, whole = tmp_path / "late", tmp_path / "whole"
    for folder, skipped in ((late, {2: 4, 3: 1}), (whole, {})):
        folder.mkdir()
        CudaJob(steps=30, slow=1, numbered=numbered, skipped=skipped).write(folder)
    trace = read_trace(late)
    assert len(trace.steps) == 26
    assert trace.steps[0] == (9 if numbered else 4)
    assert named(trace) == [1]
    for batch, same in zip(trace.batches(), [*read_trace(whole).batches()][4:], strict=True):
        np.testing.assert_allclose(batch.compute_ms, same.compute_ms)
        np.testing.assert_allclose(batch.wait_ms, same.wait_ms)


def test_ranks_without_a_common_step_are_refused(tmp_path):
    CudaJob(steps=8, skipped={2: 4}).write(tmp_path)
    late = (tmp_path / "rank2.json.gz").read_bytes()
    CudaJob(steps=4).write(tmp_path)
    (tmp_path / "rank2.json.gz").write_bytes(late)
    with pytest.raises(TraceError, match="no step in common"):
        read_trace(tmp_path)


def test_a_file_that_is_missing_hides_no_slow_device(tmp_path):
    CudaJob(slow=2).write(tmp_path)
    (tmp_path / "rank1.json.gz").unlink()
    trace = read_trace(tmp_path)
    assert trace.ranks == (0, 2, 3)
    assert named(trace) == [2]


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_file_that_ends_early_is_refused(tmp_path, share):
    CudaJob(steps=2).write(tmp_path)
    whole = tmp_path / "rank1.json.gz"
    text = gzip.decompress(whole.read_bytes())
    for content in (whole.read_bytes()[:-40], gzip.compress(text[: int(share * len(text))])):
        whole.write_bytes(content)
        with pytest.raises(TraceError, match=r"rank1.*not readable JSON"):
            read_trace(tmp_path)


@pytest.mark.parametrize("annotated", [True, False])
def test_a_run_on_the_host_alone_is_read(tmp_path, annotated):
    torch = pytest.importorskip("torch")
    from contextlib import nullcontext

    from torch.profiler import ProfilerActivity, profile, record_function

    def mark(name):
        return record_function(name) if annotated else nullcontext()

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(3):
            for _ in range(2):
                with mark("forward"):
                    loss = model(torch.ones(8, 64)).square().mean()
                with mark("backward"):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(tmp_path / "rank0.json"))
    trace = read_trace(tmp_path / "rank0.json")
    assert len(trace.steps) == 3
    for batch in trace.batches():
        for op in (Op.FORWARD, Op.BACKWARD):
            assert batch.microbatch[batch.op == op].tolist() == [0, 1]
        assert (batch.op == Op.OPTIMIZER).any()
        assert (batch.compute_ms > 0).all()


@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        ("aten::addmm", []),
        ("aten::mm", None),
        ("aten::mm", [3, 4]),
        ("aten::mm", [[-1, 4], [4, 4]]),
        ("aten::mm", [[10**400, 4], [4, 4]]),
        ("aten::mm", [["a", 4], [4, 4]]),
        ("aten::mm", {"left": 3}),
        ("aten::scaled_dot_product_attention", []),
        ("aten::convolution", [[], []]),
        ("aten::linear", []),
        ("aten::linear", [[[2, 3], [2, 3], [2, 3]], [3]]),
    ],
)
def test_shapes_that_lack_dimensions_tell_nothing(tmp_path, operator, sizes):
    events = device_events(0)
    write(tmp_path / "whole.json", 0, events)
    start = events[0]["ts"] + 20
    args = {"Input Dims": sizes}
    odd = {"ph": "X", "cat": "cpu_op", "name": operator, "ts": start, "dur": 5, "args": args}
    write(tmp_path / "odd.json", 0, [*events, odd])
    whole, other = read_trace(tmp_path / "whole.json"), read_trace(tmp_path / "odd.json")
    assert list(other.batches()) == list(whole.batches())


@pytest.mark.parametrize(
    "odd",
    [
        {"cat": "cpu_op", "name": "aten::mm", "args": {"Sequence number": None}},
        {"cat": "cpu_op", "name": "aten::mm", "dur": None},
        {"cat": "cpu_op", "name": "aten::mm", "ts": None},
        {"cat": "cpu_op", "name": "aten::mm", "ts": float("inf")},
        {"cat": "cpu_op", "name": "aten::mm", "tid": [1]},
        {"cat": ["kernel"], "name": "gemm"},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": "12"}},
        {"cat": "kernel", "name": "gemm", "dur": 0, "args": {"correlation": "12"}},
        {"cat": "kernel", "name": "gemm", "dur": -5.0},
    ],
)
def test_an_odd_event_does_not_cost_the_file(tmp_path, odd):
    events = device_events(0)
    write(tmp_path / "whole.json", 0, events)
    event = {"ph": "X", "ts": events[0]["ts"] + 20, "dur": 5, **odd}
    write(tmp_path / "odd.json", 0, [*events, event])
    whole, other = read_trace(tmp_path / "whole.json"), read_trace(tmp_path / "odd.json")
    assert list(other.batches()) == list(whole.batches())


def test_the_device_work_of_an_odd_launch_counts_where_it_ran(tmp_path):
    """As that without a launch does."""
    launched, start = {"correlation": "12"}, device_events(0)[0]["ts"] + 20
    for name, args in (("odd", launched), ("without", {})):
        extra = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": start, "dur": 5, "args": args}
        write(tmp_path / f"{name}.json", 0, [*device_events(0), extra])
    odd, without = (read_trace(tmp_path / f"{name}.json") for name in ("odd", "without"))
    assert list(odd.batches()) == list(without.batches())


def test_a_range_that_ends_before_it_begins_takes_no_time(tmp_path):
    events = device_events(0)
    load = {"ph": "X", "cat": "user_annotation", "name": "dataloader", "dur": -5.0}
    write(tmp_path / "rank0.json", 0, [*events, {**load, "ts": events[0]["ts"] + 20}])
    trace = read_trace(tmp_path / "rank0.json")
    assert trace.records["compute_ms"][trace.records["op"] == Op.DATA].tolist() == [0.0]
    assert analyze(trace).verdicts


def test_a_file_of_which_no_event_has_a_time_is_refused(tmp_path):
    write(tmp_path / "a.json", 0, [{**event, "ts": None} for event in device_events(0)])
    with pytest.raises(TraceError, match="holds no timed events"):
        read_trace(tmp_path / "a.json")


def test_a_header_that_cannot_be_read_is_refused(tmp_path):
    write(tmp_path / "a.json", 0, device_events(0), distributedInfo={"rank": 0, "pg_config": "{"})
    with pytest.raises(TraceError, match=r"a\.json: holds a header that cannot be read"):
        read_trace(tmp_path / "a.json")
