"""The monitor: times the microbatches of one rank of a training job."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from math import nan
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from resihp.client import Client
from resihp.contracts import ContractError, Job, Op

from ._clocks import CudaClock, HostClock
from ._environment import allowed_by_environment, rank_of_process, ranks_by_environment
from ._node_link import NodeLink
from ._node_socket import NodeAddress
from ._pace import heartbeat_interval_s, message_interval_s
from ._probes import Probes
from ._registration import DeferredJob, Registration
from ._sender import Sender, TelemetryReceiver, fatal_error
from ._spans import DeviceSpan, Exchange, HostSpan, Recording, StepSpan, ThreadSpan, Waiting
from ._stats import FailureLog, Stats
from ._workload import Work, snapshot

P = ParamSpec("P")
R = TypeVar("R")

_PROBE_BUDGET_MS = 5.0
_CLOSE_TIMEOUT_S = 2.0
DEFAULT_URL = "http://127.0.0.1:8700"
_FORWARD, _BACKWARD, _OPTIMIZER, _P2P, _COLLECTIVE, _DATA = (int(op) for op in Op)
_PASSES = (_FORWARD, _BACKWARD)
_RUN_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
_STEPS_UNDER_WAY = 8
"""Steps whose passes `record` numbers at the same time."""


class Monitor:
    """Times the microbatches of one rank and streams the records to the sidecar.

    After construction no method blocks, waits for a device or raises: failures of the monitor are
    counted in `stats` and logged once, and an absent, slow or broken sidecar costs records, not
    training time. Exceptions of the timed code pass through; the block that raised leaves no
    record.

    job, rank      source of the records; `rank` defaults to the environment's RANK, else 0. A `Job`
                   is registered at the sidecar; the name suffices for one registered elsewhere
    url, token     of the sidecar; default RESIHP_URL, else http://127.0.0.1:8700, and RESIHP_TOKEN
    current_step   step of the next record; `step` increments it, and code that resumes sets it
    plan_version   plan of the next record; code that applies plans sets it
    clock          None: events of the current CUDA stream if the process computes with CUDA
                   (checked as each step begins), else the host's monotonic clock
    client         used instead of `url` and `token`
    capacity       records kept until the sidecar accepts them; further ones are dropped
    batch_records  maximum number of records in one message
    interval_s     time between messages; default 0.5 s, 1 s in jobs of eight senders or more, which
                   are hosts where their ranks share one; longer in jobs of hundreds
    heartbeat_s    time between heartbeats where no message is sent; longer in jobs of more than
                   1,000 ranks; 0: none
    seed           of the jitter between retries; default the rank
    probes         False forbids short probes between two steps, which the sidecar requests from a
                   suspect and a healthy rank; default RESIHP_PROBES, else allowed
    sensors        False forbids the reading of sensors of host and device, which heartbeats carry;
                   default RESIHP_SENSORS, else allowed
    stacks         False forbids to send the Python stack of a training thread that hangs, which the
                   sidecar requests: file names, lines and functions, without values; default
                   RESIHP_STACKS, else allowed
    share_sender   True: the monitors of the job on this host send by one of them, with the same
                   `url`; default where the launcher starts several ranks on the host
                   (LOCAL_WORLD_SIZE, else WORLD_SIZE, above 1), unless `client` is given
    """

    def __init__(
        self,
        *,
        job: str | Job | DeferredJob,
        url: str | None = None,
        token: str | None = None,
        rank: int | None = None,
        clock: HostClock | CudaClock | None = None,
        client: TelemetryReceiver | None = None,
        capacity: int = 65_536,
        batch_records: int = 8_192,
        interval_s: float | None = None,
        heartbeat_s: float = 1.0,
        seed: int | None = None,
        probes: bool | None = None,
        stacks: bool | None = None,
        sensors: bool | None = None,
        share_sender: bool | None = None,
    ) -> None:
        self.rank = rank_of_process(rank)
        _check(job, capacity, batch_records, interval_s, heartbeat_s)
        failures = FailureLog()
        host = clock if isinstance(clock, HostClock) else HostClock()
        device = clock if isinstance(clock, CudaClock) else None
        self._recording = Recording(failures, host.now_ns, device, look_for_cuda=clock is None)
        if probes is None:
            probes = allowed_by_environment("RESIHP_PROBES")
        if stacks is None:
            stacks = allowed_by_environment("RESIHP_STACKS")
        if sensors is None:
            sensors = allowed_by_environment("RESIHP_SENSORS")
        self._probes = Probes(failures, allowed=probes, budget_ms=_PROBE_BUDGET_MS)
        ranks = ranks_by_environment("WORLD_SIZE") or 1
        if isinstance(job, Job):
            ranks = len(job.layout.ranks)
        heartbeat_s = heartbeat_interval_s(heartbeat_s, ranks)
        seed = self.rank if seed is None else seed
        registration = Registration(job, self.rank, failures)
        receiver: TelemetryReceiver | NodeLink
        receiver = client or Client(
            url or os.environ.get("RESIHP_URL") or DEFAULT_URL,
            token or os.environ.get("RESIHP_TOKEN"),
        )
        together = ranks_by_environment("LOCAL_WORLD_SIZE", "WORLD_SIZE") or 1
        shares = client is None and together > 1 if share_sender is None else share_sender
        interval_s = message_interval_s(interval_s, ranks, together if shares else 1)
        if shares and isinstance(receiver, Client) and NodeAddress.is_possible():
            receiver = NodeLink(
                receiver, NodeAddress(registration.name, receiver.url), registration.name,
                self.rank, failures, interval_s=interval_s, heartbeat_s=heartbeat_s, seed=seed,
            )  # fmt: skip
        self._sender = Sender(
            receiver, registration, self.rank, self._recording, capacity=capacity,
            batch_records=batch_records, interval_s=interval_s, heartbeat_s=heartbeat_s,
            stacks=stacks, seed=seed, probes=self._probes, sensors=sensors,
        )  # fmt: skip
        self._recorded_indices: dict[int, dict[int, int]] = {}
        self._recording.put = self._sender.buffer.put
        self._recording.on_first_step = self._sender.buffer.open
        self._finalizer = weakref.finalize(self, self._sender.end, _CLOSE_TIMEOUT_S, fatal_error)
        self._finalizer.atexit = False  # the sender waits for itself then
        _reset_in_children(self)

    @property
    def current_step(self) -> int:
        """Step of the next record."""
        return self._recording.step

    @current_step.setter
    def current_step(self, step: int) -> None:
        recording = self._recording
        if step != recording.step:
            recording.next_index.clear()
        recording.step = step

    @property
    def plan_version(self) -> int:
        """Plan of the next record."""
        return self._recording.plan_version

    @plan_version.setter
    def plan_version(self, version: int) -> None:
        self._recording.plan_version = version

    @overload
    def step(self, function: Callable[P, R]) -> Callable[P, R]: ...
    @overload
    def step(self) -> StepSpan: ...
    def step(self, function: Callable[P, R] | None = None) -> Callable[P, R] | StepSpan:
        """One training step: a decorator, or `with monitor.step():`.

        `current_step` is incremented at its end, also by an exception. A step without any record
        is recorded as a whole, as the forward pass of microbatch 0. Raises `ContractError` for a
        generator or coroutine function, whose calls end before their work begins.
        """
        if function is None:
            return StepSpan(self._recording, self.between_steps)
        timed = function
        if any(is_lazy(timed) for is_lazy in _RUN_LATER):
            raise ContractError("step", "for a generator or coroutine write `with monitor.step():`")

        @functools.wraps(timed)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with StepSpan(self._recording, self.between_steps):
                return timed(*args, **kwargs)

        return run

    def microbatch(
        self,
        *,
        seq_lens: Any = None,
        cu_seqlens: Any = None,
        attention_mask: Any = None,
        op: Op = Op.FORWARD,
        chunk: int = 0,
        index: int | None = None,
    ) -> HostSpan | DeviceSpan:
        """`with monitor.microbatch(seq_lens=lengths):` times one pass of one microbatch.

        The work in it comes from one of: the sequences' lengths; their cumulative sum with a
        leading 0; an attention mask, either (rows, positions), nonzero at tokens, or
        (rows[, heads], positions, positions), nonzero where a position attends to another, causal
        or not (floating: additive, 0 attends). Lists, numpy arrays and tensors on any device are
        accepted. A backward pass without any has the work of the forward pass of its index.
        `index` defaults to the number of earlier passes of this op and chunk in the step.
        """
        return self._pass(op, seq_lens, cu_seqlens, attention_mask, chunk, index)

    def forward(
        self,
        *,
        seq_lens: Any = None,
        cu_seqlens: Any = None,
        attention_mask: Any = None,
        chunk: int = 0,
        index: int | None = None,
    ) -> HostSpan | DeviceSpan:
        """A forward pass, as `microbatch`."""
        return self._pass(_FORWARD, seq_lens, cu_seqlens, attention_mask, chunk, index)

    def backward(
        self,
        *,
        seq_lens: Any = None,
        cu_seqlens: Any = None,
        attention_mask: Any = None,
        chunk: int = 0,
        index: int | None = None,
    ) -> HostSpan | DeviceSpan:
        """A backward pass, as `microbatch`."""
        return self._pass(_BACKWARD, seq_lens, cu_seqlens, attention_mask, chunk, index)

    def optimizer(self) -> HostSpan | DeviceSpan:
        """The optimizer's update."""
        recording = self._recording
        return recording.kind(recording, _OPTIMIZER, -1, 0, -1, None)

    def data(self) -> HostSpan:
        """Waiting for input; timed by the host's clock, because no stream takes part.

        In another thread than the loop's it is a record, and leaves the loop's blocks alone. Before
        the first step the loop's thread is the one that made the monitor.
        """
        recording = self._recording
        kind = HostSpan if recording.loop_thread == threading.get_ident() else ThreadSpan
        return kind(recording, _DATA, -1, 0, -1, None)

    def p2p(self, *, peer: int = -1) -> Exchange:
        """A transfer from or to `peer`; inside another block also waiting of that block.

        Both ends enclose it, within blocks of the same microbatch and chunk: the detector takes
        what the end that came first waited for the other out of the transfer.
        """
        return Exchange(self._recording, _P2P, peer)

    def collective(self) -> Exchange:
        """A collective operation; inside another block also waiting of that block."""
        return Exchange(self._recording, _COLLECTIVE, -1)

    def waiting(self) -> Waiting:
        """Time blocked on other ranks within the innermost open block: part of its `wait_ms`
        instead of its `compute_ms`, without a record of its own."""
        return Waiting(self._recording)

    def record(
        self,
        *,
        op: Op,
        compute_ms: float,
        step: int | None = None,
        microbatch: int = -1,
        wait_ms: float | None = nan,
        chunk: int = 0,
        tokens: int = -1,
        sequences: int = -1,
        sum_sq_len: int = -1,
        max_len: int = -1,
        peer: int = -1,
        start_ms: float = nan,
    ) -> None:
        """Add a record that the caller timed; the fields are those of `TelemetryBatch`.

        A pass without `microbatch` is numbered as by `microbatch()`, in the order of the calls for
        its step.
        """
        try:
            if microbatch == -1 and op in _PASSES:
                microbatch = self._next_index(op, chunk, step)
        except Exception:  # noqa: BLE001, S110 the sender counts what is wrong with it
            pass
        recording = self._recording
        recording.recorded = True
        put = recording.put
        put((
            recording.plan_version, recording.step if step is None else step, microbatch, chunk, op,
            compute_ms, wait_ms, tokens, sequences, sum_sq_len, max_len, peer, start_ms,
        ))  # fmt: skip

    def _next_index(self, op: Op, chunk: int, step: int | None) -> int:
        """Return the number of earlier passes of a kind in a step, the present one or one of the
        last few that were given to `record`."""
        recording, counts_of = self._recording, self._recorded_indices
        if step is None or step == recording.step:
            counts = recording.next_index
        else:
            counts = counts_of.setdefault(step, {})
            if len(counts_of) > _STEPS_UNDER_WAY:
                del counts_of[next(iter(counts_of))]
        key = chunk << 3 | op
        index = counts.get(key, 0)
        counts[key] = index + 1
        return index

    def between_steps(self) -> None:
        """Run a probe that the sidecar has requested, if any; `step` calls this at its end."""
        if self._probes.requests:
            self._probes.run()

    def while_idle(self) -> None:
        """Run the probes requested of a rank without work; to be called in its waiting loop.

        An empty record every 5 s keeps the requests coming: a slow device may be healthy again.
        """
        if self._probes.is_call_due():
            self.record(op=Op.DATA, compute_ms=0.0)
        self.between_steps()

    @property
    def stats(self) -> Stats:
        """Counts of the records so far."""
        counts, buffer = self._sender.counts, self._sender.buffer
        return Stats(
            queued=len(buffer.entries) + self._sender.in_flight,
            sent=counts.records,
            batches=counts.batches,
            dropped=buffer.dropped,
            retries=counts.retries,
            refused=counts.refused,
            failures=self._recording.failures.count,
        )

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Send what is buffered and that this rank leaves, for at most `timeout_s`.

        The end of the process does the same.
        """
        self._close(timeout_s, None)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(_CLOSE_TIMEOUT_S, error)

    def _close(self, timeout_s: float, error: BaseException | None) -> None:
        self._finalizer.detach()
        self._sender.close(timeout_s, lambda: error)

    def _pass(
        self,
        op: int,
        seq_lens: Any,
        cu_seqlens: Any,
        attention_mask: Any,
        chunk: int,
        index: int | None,
    ) -> HostSpan | DeviceSpan:
        recording = self._recording
        if recording.open is None:
            recording.begin()
        work: Work | None = None
        try:
            if index is None:
                key = chunk << 3 | op
                counts = recording.next_index
                index = counts.get(key, 0)
                counts[key] = index + 1
            if seq_lens is not None or cu_seqlens is not None or attention_mask is not None:
                work = snapshot(seq_lens, cu_seqlens, attention_mask)
        except Exception as error:  # noqa: BLE001 the boundary: the time is useful without it
            recording.failures.add("reading a microbatch's work", error)
        kind = recording.kind
        return kind(recording, op, -1 if index is None else index, chunk, -1, work)

    def _reset(self) -> None:
        """Drop the parent's records, thread and device in a forked child."""
        self._recording.reset(self._sender.buffer.open)
        self._probes.reset()
        self._sender.reset()


def hook(
    *, job: str | Job, url: str | None = None, **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a training step: `@resihp.hook(job=job)` is `@Monitor(job=job).step`.

    `options` are those of `Monitor`. The decorated function has the monitor as its attribute
    `monitor`, for `train_step.monitor.microbatch(…)` inside it; without any such block the step is
    recorded as a whole.
    """
    monitor = Monitor(job=job, url=url, **options)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        timed = monitor.step(function)
        timed.monitor = monitor  # type: ignore[attr-defined]
        return timed

    return decorate


def _check(
    job: str | Job | DeferredJob,
    capacity: int,
    batch_records: int,
    interval_s: float | None,
    heartbeat_s: float,
) -> None:
    if not job:
        raise ContractError("job", "must be the job, or its name")
    for name, value in (("capacity", capacity), ("batch_records", batch_records)):
        if value < 1:
            raise ContractError(name, f"must be 1 or more, not {value}")
    if interval_s is not None and not interval_s > 0:
        raise ContractError("interval_s", f"must be above 0, not {interval_s}")
    if not heartbeat_s >= 0:
        raise ContractError("heartbeat_s", f"must be 0 or more, not {heartbeat_s}")


def _reset_in_children(monitor: Monitor) -> None:
    reference = weakref.ref(monitor)

    def reset() -> None:
        alive = reference()
        if alive is not None:
            alive._reset()

    os.register_at_fork(after_in_child=reset)
