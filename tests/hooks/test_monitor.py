"""What a monitor records, told by a clock set by hand."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import resihp
from resihp.contracts import COLUMNS, ContractError, Op
from resihp.hooks._environment import ranks_by_environment


def row(batch, index=0):
    return {name: getattr(batch, name)[index].item() for name in COLUMNS}


def test_a_microbatch_holds_its_place_its_time_and_its_work(monitor, sidecar, hands):
    monitor.current_step = 41
    with monitor.step():
        pass
    with monitor.step(), monitor.microbatch(seq_lens=[3, 4], chunk=1, index=7):
        hands.pass_ms(12.5)
    monitor.close()
    assert row(sidecar.records, 1) == pytest.approx(
        {
            "rank": 3, "step": 42, "microbatch": 7, "chunk": 1, "op": Op.FORWARD,
            "compute_ms": 12.5, "wait_ms": np.nan, "tokens": 7, "sequences": 2,
            "sum_sq_len": 25, "max_len": 4, "peer": -1, "start_ms": np.nan,
        },
        nan_ok=True,
    )  # fmt: skip


def test_waiting_is_taken_out_of_compute(monitor, sidecar, hands):
    with monitor.backward():
        hands.pass_ms(5)
        with monitor.waiting():
            hands.pass_ms(30)
            with monitor.waiting():  # within a wait: not counted twice
                hands.pass_ms(1)
        hands.pass_ms(2)
        with monitor.waiting():
            hands.pass_ms(4)
    monitor.close()
    assert sidecar.records.compute_ms.tolist() == pytest.approx([7])
    assert sidecar.records.wait_ms.tolist() == pytest.approx([35])


def test_an_exchange_is_a_record_and_the_waiting_of_the_block_around_it(monitor, sidecar, hands):
    with monitor.forward(index=5, chunk=2):
        hands.pass_ms(5)
        with monitor.p2p(peer=9):
            hands.pass_ms(3)
        with monitor.waiting(), monitor.collective():
            hands.pass_ms(2)
    monitor.close()
    records = sidecar.records
    assert records.op.tolist() == [Op.P2P, Op.COLLECTIVE, Op.FORWARD]
    assert records.compute_ms.tolist() == pytest.approx([3, 2, 5])
    assert records.wait_ms[2] == pytest.approx(5)
    assert records.microbatch.tolist() == [5, 5, 5]
    assert records.chunk.tolist() == [2, 2, 2]
    assert records.peer.tolist() == [9, -1, -1]


def test_a_transfer_says_when_it_began(monitor, sidecar, hands):
    begun_ms = hands.ns * 1e-6
    with monitor.forward():
        hands.pass_ms(5)
        with monitor.p2p(peer=9):
            hands.pass_ms(3)
    monitor.record(op=Op.P2P, compute_ms=0.0, peer=4, start_ms=12.5)
    monitor.close()
    records = sidecar.records
    assert records.op.tolist() == [Op.P2P, Op.FORWARD, Op.P2P]
    assert records.start_ms.tolist() == pytest.approx([begun_ms + 5, np.nan, 12.5], nan_ok=True)


def test_a_loader_in_another_thread_leaves_the_blocks_of_the_loop_alone(monitor, sidecar, hands):
    def load() -> None:
        with monitor.data():
            begun.set()
            assert ending.wait(300)

    begun, ending = threading.Event(), threading.Event()
    loader = threading.Thread(target=load)
    with monitor.step():
        with monitor.forward():
            loader.start()
            assert begun.wait(300)
            hands.pass_ms(30)
        ending.set()
        loader.join()
        with monitor.collective():
            hands.pass_ms(20)
    monitor.close()
    records = sidecar.records
    assert records.op.tolist() == [Op.FORWARD, Op.DATA, Op.COLLECTIVE]
    assert records.compute_ms.tolist() == pytest.approx([30, 30, 20])
    assert records.microbatch.tolist() == [0, -1, -1]
    assert np.isnan(records.wait_ms).all()


@pytest.mark.parametrize("in_steps", [True, False])
def test_a_loader_that_comes_before_the_first_step_is_not_the_loop(
    monitor, sidecar, hands, in_steps
):
    def load() -> None:
        for _ in range(2):
            with monitor.data():
                begun.set()
                assert ending.wait(300)
            loaded.set()

    def step() -> None:
        with monitor.step() if in_steps else nullcontext(), monitor.forward():
            assert monitor._recording.open.op == Op.FORWARD
            hands.pass_ms(30)
        with monitor.data():
            assert monitor._recording.open.op == Op.DATA

    begun, ending, loaded = (threading.Event() for _ in range(3))
    loader = threading.Thread(target=load)
    loader.start()
    assert begun.wait(300)
    assert monitor._recording.open is None
    ending.set()
    assert loaded.wait(300)  # its record has started the sender
    loop = threading.Thread(target=step)
    loop.start()
    loop.join()
    assert monitor._recording.loop_thread == loop.ident
    assert monitor._recording.thread_id == loop.native_id
    loader.join()
    monitor.close()
    assert sorted(sidecar.records.op) == [Op.FORWARD, Op.DATA, Op.DATA, Op.DATA]


def test_a_step_that_runs_later_than_its_call_is_refused(monitor):
    def passes():
        yield

    async def step():
        pass

    async def stream():
        yield

    for function in (passes, step, stream):
        with pytest.raises(ContractError, match=r"with monitor\.step"):
            monitor.step(function)


def test_times_without_an_end_are_as_long_as_a_thread_can_wait(make_monitor, sidecar):
    monitor = make_monitor(interval_s=1e300, heartbeat_s=0)
    monitor.record(op=Op.FORWARD, compute_ms=1.0)
    monitor.close(float("inf"))
    assert len(sidecar.records) == 1


def test_waiting_outside_any_block_is_nobodys(monitor, sidecar, hands):
    with monitor.waiting():
        hands.pass_ms(5)
    with monitor.optimizer():
        hands.pass_ms(1)
    with monitor.data():
        hands.pass_ms(2)
    monitor.close()
    assert sidecar.records.op.tolist() == [Op.OPTIMIZER, Op.DATA]
    assert sidecar.records.compute_ms.tolist() == pytest.approx([1, 2])
    assert np.isnan(sidecar.records.wait_ms).all()


def test_indices_count_per_op_and_chunk_and_start_again_with_each_step(monitor, sidecar):
    for _ in range(2):
        with monitor.step():
            for chunk in (0, 0, 1):
                with monitor.forward(chunk=chunk):
                    pass
            with monitor.backward():
                pass
    monitor.close()
    assert sidecar.records.microbatch.tolist() == [0, 1, 0, 0] * 2
    assert sidecar.records.step.tolist() == [0] * 4 + [1] * 4


def test_a_backward_pass_has_the_work_of_its_forward_pass(monitor, sidecar):
    with monitor.step():
        for lengths in ([5], [6, 7]):
            with monitor.forward(seq_lens=lengths):
                pass
        for _ in range(2):
            with monitor.backward():
                pass
    with monitor.step(), monitor.backward():
        pass
    monitor.close()
    assert sidecar.records.tokens.tolist() == [5, 13, 5, 13, -1]


def test_a_step_without_records_is_recorded_as_a_whole(sidecar, hands, make_monitor):
    monitor = make_monitor()

    @monitor.step
    def train(ms, *, wait_ms):
        """Doc."""
        hands.pass_ms(ms)
        with monitor.waiting():
            hands.pass_ms(wait_ms)
        return ms

    assert train(20, wait_ms=5) == 20
    assert train.__doc__ == "Doc."
    monitor.close()
    records = sidecar.records
    assert (records.microbatch.tolist(), records.op.tolist()) == ([0], [Op.FORWARD])
    assert records.compute_ms.tolist() == pytest.approx([20])
    assert records.wait_ms.tolist() == pytest.approx([5])


def test_the_users_exceptions_pass_and_leave_no_record(monitor, sidecar):
    with pytest.raises(KeyError), monitor.step(), monitor.microbatch(), monitor.p2p():
        raise KeyError("theirs")
    with monitor.microbatch():
        pass
    monitor.close()
    assert sidecar.records.step.tolist() == [1]
    assert monitor.stats.failures == monitor.stats.dropped == 0


def test_blocks_that_end_in_another_order_leave_none_open(monitor, sidecar, hands):
    with monitor.step():
        outer, inner = monitor.forward().start(), monitor.backward().start()
        hands.pass_ms(1)
        outer.stop()
        with monitor.optimizer():
            hands.pass_ms(1)
            inner.stop()
            with monitor.waiting():
                hands.pass_ms(4)
        late = monitor.forward().start()
    late.stop()
    outer.cancel()
    assert monitor._recording.open is None
    monitor.close()
    records = sidecar.records
    assert records.op.tolist() == [Op.FORWARD, Op.BACKWARD, Op.OPTIMIZER, Op.FORWARD]
    assert records.compute_ms.tolist() == [1, 2, 1, 0]
    assert records.wait_ms.tolist()[2] == 4


def test_ends_of_blocks_that_are_not_open_do_nothing(monitor, sidecar, hands):
    monitor.forward().stop()
    monitor.step().cancel()
    monitor.waiting().stop()
    with monitor.step():
        for block in (monitor.forward(), monitor.collective()):
            block.start()
            hands.pass_ms(2)
            block.stop()
            hands.pass_ms(1)
            block.stop()
            block.cancel()
    monitor.close()
    assert sidecar.records.compute_ms.tolist() == [2, 2]
    assert monitor.stats.failures == 0


def test_a_block_that_is_started_again_counts_as_a_failure(monitor, sidecar, hands):
    block = monitor.forward()
    for ms in (2, 3):
        block.start()
        hands.pass_ms(ms)
        block.stop()
    monitor.close()
    assert sidecar.records.compute_ms.tolist() == [2]
    assert monitor.stats.failures == 1


def test_a_block_ends_those_inside_it(monitor, sidecar):
    with monitor.step():
        with monitor.forward():
            monitor.data().start()
        assert monitor._recording.open.microbatch == -1
        monitor.forward().start()
    assert monitor._recording.open is None
    monitor.close()
    assert len(sidecar.records) == 1


def test_a_step_ends_blocks_that_were_entered_twice(monitor, sidecar):
    with monitor.step():
        outer = monitor.forward().start()
        inner = monitor.backward().start()
        outer.start()
        inner.start()
    assert monitor._recording.open is None
    with monitor.step(), monitor.forward():
        inner.stop()
    assert monitor._recording.open is None


def test_record_takes_what_an_engine_timed_itself(monitor, sidecar):
    monitor.record(
        op=Op.FORWARD, step=9, microbatch=2, compute_ms=1.5, wait_ms=None, tokens=8, sequences=2,
        sum_sq_len=34, max_len=5, chunk=1, peer=4,
    )  # fmt: skip
    monitor.current_step = 10
    monitor.record(op=Op.DATA, compute_ms=2)
    monitor.close()
    records = sidecar.records
    assert records.step.tolist() == [9, 10]
    assert records.compute_ms.tolist() == [1.5, 2]
    assert (records.sum_sq_len[0], records.peer[0], records.chunk[0]) == (34, 4, 1)


def test_recorded_passes_are_numbered_within_their_step_as_blocks_are(monitor, sidecar):
    monitor.record(op=Op.FORWARD, compute_ms=1)
    with monitor.forward():
        pass
    monitor.record(op=Op.FORWARD, compute_ms=1, step=0)
    monitor.record(op=Op.BACKWARD, compute_ms=1)
    monitor.record(op=Op.BACKWARD, compute_ms=1, chunk=1)
    monitor.record(op=Op.FORWARD, compute_ms=1, microbatch=7)
    monitor.record(op=Op.OPTIMIZER, compute_ms=1)
    monitor.current_step = 1
    monitor.record(op=Op.FORWARD, compute_ms=1)
    with monitor.step():
        monitor.record(op=Op.FORWARD, compute_ms=1)
    monitor.close()
    assert sidecar.records.microbatch.tolist() == [0, 1, 2, 0, 0, 7, -1, 0, 0]


def test_recorded_passes_of_other_steps_are_numbered_too(monitor, sidecar):
    for step in range(1, 30):
        for _ in range(2):
            monitor.record(op=Op.FORWARD, compute_ms=1, step=step)
            monitor.record(op=Op.BACKWARD, compute_ms=1, step=step - 1)
    monitor.record(op=Op.FORWARD, compute_ms=1, step=["no number"])
    monitor.close()
    assert sidecar.records.microbatch.tolist() == [0, 0, 1, 1] * 29
    assert monitor.stats.dropped == 1


def test_plan_versions_never_share_a_batch(monitor, sidecar):
    for version in (0, 0, 1, 2, 2):
        monitor.plan_version = version
        monitor.record(op=Op.FORWARD, compute_ms=1)
    monitor.close()
    sizes = {}
    for batch in sidecar.batches:
        sizes[batch.plan_version] = sizes.get(batch.plan_version, 0) + len(batch)
    assert sizes == {0: 2, 1: 1, 2: 2}


def test_a_malformed_record_takes_no_other_with_it(monitor, sidecar, caplog):
    for step in (1, "two", -3, 4):
        monitor.record(op=Op.FORWARD, compute_ms=1, step=step)
    with monitor.microbatch(seq_lens=["long", "short"], index=5):
        pass
    with monitor.microbatch(seq_lens=[1], cu_seqlens=[0, 1]):
        pass
    monitor.close()
    assert sidecar.records.step.tolist() == [1, 4, 0, 0]
    assert sidecar.records.tokens.tolist() == [-1] * 4
    assert (monitor.stats.dropped, monitor.stats.failures) == (2, 4)
    assert len([r for r in caplog.records if "a record failed" in r.message]) == 1


def test_no_record_raises_or_takes_others_with_it(monitor, sidecar):
    for wrong in (np.arange(2), torch.arange(2)):
        for field in ("op", "step", "microbatch", "chunk", "compute_ms"):
            monitor.record(**{"op": Op.FORWARD, "compute_ms": 1.0, field: wrong})
    monitor.record(op=Op.FORWARD, compute_ms=1.0, step=7)
    monitor.close()
    assert sidecar.records.step.tolist() == [7]
    assert monitor.stats.dropped == 10


def test_hook_is_a_monitored_step(sidecar, hands):
    @resihp.hook(job="j", client=sidecar, rank=0, clock=hands.clock)
    def train():
        with train.monitor.microbatch(seq_lens=[2]):
            hands.pass_ms(1)

    train()
    train()
    train.monitor.close()
    assert sidecar.records.step.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"job": ""}, "job"),
        ({"rank": -1}, "rank"),
        ({"capacity": 0}, "capacity"),
        ({"interval_s": 0}, "interval_s"),
        ({"url": "ftp://x"}, "url"),
    ],
)
def test_what_cannot_be_is_refused_before_training(options, field):
    with pytest.raises(ContractError) as caught:
        resihp.Monitor(**{"job": "j", **options})
    assert caught.value.field == field


def test_rank_url_and_token_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "12")
    monkeypatch.setenv("RESIHP_URL", "no address")
    with pytest.raises(ContractError, match="no address"):
        resihp.Monitor(job="j")
    monkeypatch.setenv("RESIHP_URL", "http://127.0.0.1:1")
    assert resihp.Monitor(job="j").rank == 12
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ContractError, match="RANK"):
        resihp.Monitor(job="j")


@pytest.mark.parametrize(
    ("local", "world", "ranks"),
    [("2", "8", 2), ("", "8", 8), (None, "8", 8), (None, None, None), ("two", "8", None)],
)
def test_the_number_of_ranks_in_the_environment(monkeypatch, local, world, ranks):
    for name, given in (("LOCAL_WORLD_SIZE", local), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    assert ranks_by_environment("LOCAL_WORLD_SIZE", "WORLD_SIZE") == ranks
