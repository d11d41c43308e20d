"""What a training process calls."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from math import nan
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from resihp.client import Client
from resihp.contracts import Job, Op

from ._arguments import check, device_of, rank_of_process, start_afresh_in_children
from ._clocks import CudaClock, HostClock, running_cuda
from ._failures import Failures
from ._probes import LinkProbe, Probes, allowed_by_environment
from ._registration import Registration
from ._sender import Sender, Telemetry
from ._spans import DeviceSpan, Exchange, HostSpan, Span, Step, Waiting
from ._stats import Stats
from ._workload import Work, snapshot

P = ParamSpec("P")
R = TypeVar("R")

_PROBE_BUDGET_MS = 5.0
DEFAULT_URL = "http://127.0.0.1:8700"
_FORWARD, _BACKWARD, _OPTIMIZER, _P2P, _COLLECTIVE, _DATA = (int(op) for op in Op)


class Monitor:
    """Times the microbatches of one rank and streams the records to the sidecar.

    No method blocks, waits for a device or raises once the monitor stands: trouble of its own is
    counted in `stats` and logged once, and a sidecar that is away, slow or broken costs records,
    not training time. Exceptions of the timed code pass through; the block that raised leaves no
    record.

    job, rank      whose records; `rank` defaults to the environment's RANK, else 0. A `Job` is made
                   known to the sidecar; of one that is known to it the name is enough
    url, token     of the sidecar; default RESIHP_URL, else http://127.0.0.1:8700, and RESIHP_TOKEN
    current_step   step of the next record; `step` counts it up, and resuming code sets it
    plan_version   plan under which the next record is made; code that applies plans sets it
    clock          None: events of the current CUDA stream where the process computes with CUDA
                   (looked up as each step begins), else the host's monotonic clock
    client         used instead of `url` and `token`
    capacity       records kept while the sidecar does not take them; further ones are dropped
    batch_records  most records in one message
    interval_s     time between messages
    seed           of the jitter between retries; default the rank
    probes         False forbids short probes between two steps, which the sidecar asks a suspect
                   and a healthy rank for; default RESIHP_PROBES, else allowed
    link_probe     times a transfer with a peer, for probes of links; it bounds its own waiting
    """

    def __init__(
        self,
        *,
        job: str | Job,
        url: str | None = None,
        token: str | None = None,
        rank: int | None = None,
        clock: HostClock | CudaClock | None = None,
        client: Telemetry | None = None,
        capacity: int = 65_536,
        batch_records: int = 8_192,
        interval_s: float = 0.5,
        seed: int | None = None,
        probes: bool | None = None,
        link_probe: LinkProbe | None = None,
    ) -> None:
        self.rank = rank_of_process(rank)
        check(job, capacity, batch_records, interval_s)
        self.current_step = 0
        self.plan_version = 0
        self._failures = Failures()
        self._kind: type[HostSpan] | type[DeviceSpan]
        self._use(clock if isinstance(clock, CudaClock) else None)
        self._look_for_cuda = clock is None
        self._now_ns = (clock if isinstance(clock, HostClock) else HostClock()).now_ns
        self._open: Span | None = None
        self._recorded = False
        self._next_index: dict[int, int] = {}
        allowed = allowed_by_environment() if probes is None else probes
        self._probes = Probes(
            self._failures, allowed=allowed, link=link_probe, budget_ms=_PROBE_BUDGET_MS
        )
        self._sender = Sender(
            client or Client(url or os.environ.get("RESIHP_URL") or DEFAULT_URL,
                             token or os.environ.get("RESIHP_TOKEN")),
            Registration(job, self.rank), self.rank, self._failures, capacity=capacity,
            batch_records=batch_records, interval_s=interval_s,
            seed=self.rank if seed is None else seed, device=device_of(self), probes=self._probes,
        )  # fmt: skip
        self._put = self._sender.buffer.put
        self._finalizer = weakref.finalize(self, self._sender.close, 2.0)
        start_afresh_in_children(self)

    @overload
    def step(self, function: Callable[P, R]) -> Callable[P, R]: ...
    @overload
    def step(self) -> Step: ...
    def step(self, function: Callable[P, R] | None = None) -> Callable[P, R] | Step:
        """One training step: a decorator, or `with monitor.step():`.

        `current_step` counts up as it ends, be it by an exception. A step within which nothing was
        recorded is recorded as a whole, as the forward pass of microbatch 0.
        """
        if function is None:
            return Step(self)
        timed = function

        @functools.wraps(timed)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with Step(self):
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
        leading 0; an attention mask, either (rows, positions) with nonzero where there is a token
        or (rows[, heads], positions, positions) of what attends to what, causal or not (floating:
        additive, 0 attends). Lists, numpy arrays and tensors on any device do. A backward pass
        without any has the work of the forward pass of its index. `index` counts the passes of
        this op and chunk within the step where it is not given.
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
        return self._kind(self, _OPTIMIZER, -1, 0, -1, None)

    def data(self) -> HostSpan:
        """Waiting for input; always by the host's clock, because no stream takes part."""
        return HostSpan(self, _DATA, -1, 0, -1, None)

    def p2p(self, *, peer: int = -1) -> Exchange:
        """A transfer from or to `peer`. Within another block it is that block's waiting."""
        return self._exchange(_P2P, peer)

    def collective(self) -> Exchange:
        """A collective operation. Within another block it is that block's waiting."""
        return self._exchange(_COLLECTIVE, -1)

    def waiting(self) -> Waiting:
        """Time blocked on others within the innermost open block: it counts as that block's
        `wait_ms` and not as its `compute_ms`, and is no record of its own."""
        return Waiting(self)

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
    ) -> None:
        """A record of what the caller timed itself; the fields are those of `TelemetryBatch`."""
        self._recorded = True
        self._put((
            self.plan_version, self.current_step if step is None else step, microbatch, chunk, op,
            compute_ms, wait_ms, tokens, sequences, sum_sq_len, max_len, peer,
        ))  # fmt: skip

    def between_steps(self) -> None:
        """Run what the sidecar asks for, if anything; `step` does it by itself as it ends."""
        if self._probes.orders:
            self._probes.run()

    def while_idle(self) -> None:
        """For the loop in which a rank waits for work: tells the sidecar now and then that it is
        there, and runs the probes asked for in return: a slow device may be healthy again."""
        if self._probes.is_call_due():
            self.record(op=Op.DATA, compute_ms=0.0)
        self.between_steps()

    @property
    def stats(self) -> Stats:
        """What became of the records so far."""
        counts, buffer = self._sender.counts, self._sender.buffer
        return Stats(
            queued=len(buffer.rows) + self._sender.in_hand,
            sent=counts.records,
            batches=counts.batches,
            dropped=buffer.dropped,
            retries=counts.retries,
            refused=counts.refused,
            failures=self._failures.count,
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is buffered, for at most `timeout_s`. The end of the process does the same."""
        self._finalizer.detach()
        self._sender.close(timeout_s)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pass(
        self,
        op: int,
        seq_lens: Any,
        cu_seqlens: Any,
        attention_mask: Any,
        chunk: int,
        index: int | None,
    ) -> HostSpan | DeviceSpan:
        work: Work | None = None
        try:
            if index is None:
                key = chunk << 3 | op
                counts = self._next_index
                index = counts.get(key, 0)
                counts[key] = index + 1
            if seq_lens is not None or cu_seqlens is not None or attention_mask is not None:
                work = snapshot(seq_lens, cu_seqlens, attention_mask)
        except Exception as error:  # noqa: BLE001 the boundary: the time is worth having without
            self._failures.add("reading a microbatch's work", error)
        return self._kind(self, op, -1 if index is None else index, chunk, -1, work)

    def _exchange(self, op: int, peer: int) -> Exchange:
        outer = self._open
        index, chunk = (-1, 0) if outer is None else (outer.microbatch, outer.chunk)
        return Exchange(self._kind(self, op, index, chunk, peer, None), Waiting(self))

    def _begin_step(self) -> HostSpan | DeviceSpan:
        self._next_index.clear()
        self._recorded = False
        if self._look_for_cuda:
            try:
                self._use(running_cuda())
            except Exception as error:  # noqa: BLE001 the boundary: the host's clock does as well
                self._failures.add("looking for CUDA", error)
                self._look_for_cuda = False
        return self._kind(self, _FORWARD, -1, 0, -1, None)

    def _use(self, device: CudaClock | None) -> None:
        self._device = device
        self._kind = HostSpan if device is None else DeviceSpan
        self._look_for_cuda = device is None

    def _start_afresh(self) -> None:
        """In a forked child: the parent's records, thread and device are not this process's."""
        if self._device is not None:
            self._use(None)
        self._open = None
        self._probes.reset()
        self._sender.reset()
