"""Synthetic jobs for tests, notebooks and benchmarks: seeded, with known faults.

Documents of given lengths are packed into microbatches of a token budget. Times follow a cost
that is not the detector's own model: attention runs less efficiently on short documents, every
document costs something, and every launch does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from detector.arrays import Floats, Ints
from detector.rank_table import RankTable
from resihp.contracts import Job, Op, TelemetryBatch
from resihp.pipeline.orders import Pass, job_orders
from resihp.pipeline.replay import replay


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rank computes `factor` times as long in [from_step, until_step).

    ramp_steps  steps over which it grows to the full factor (thermal onset)
    period      on for so many steps, off for as many (0: always on)
    """

    rank: int
    factor: float
    from_step: int
    until_step: int = 1 << 40
    ramp_steps: int = 0
    period: int = 0

    def at(self, step: int) -> float:
        """The factor in a step."""
        if not self.from_step <= step < self.until_step:
            return 1.0
        if self.period and (step - self.from_step) // self.period % 2:
            return 1.0
        if step < self.from_step + self.ramp_steps:
            done = (step - self.from_step + 1) / (self.ramp_steps + 1)
            return 1.0 + (self.factor - 1.0) * done
        return self.factor


@dataclass(frozen=True, kw_only=True)
class Surge:
    """The microbatches of one replica hold `factor` times the work from a step on.

    longer  documents become longer, at as many tokens; else there are more of them
    """

    replica: int
    factor: float
    from_step: int
    longer: bool = False


def whole_replica(job: Job, replica: int, factor: float, from_step: int) -> tuple[Fault, ...]:
    """All devices of a replica become slow at once, as in a hot rack."""
    ranks = job.layout.replicas[replica].ranks
    return tuple(Fault(rank=rank, factor=factor, from_step=from_step) for rank in ranks)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random variation of the time of equal work; standard deviations of logs.

    record   of single records
    step     of a rank over a whole step
    offset   of a rank for good
    outliers share of records that are interrupted, by a factor of up to 1 + 2 `outlier_size`
    hiccups  share of the steps of a rank that take up to five times as long (garbage collection)
    delays   mean share by which each record takes longer (exponential), as where other work on the
             host interrupts it
    """

    record: float = 0.01
    step: float = 0.002
    offset: float = 0.007
    outliers: float = 0.002
    outlier_size: float = 0.5
    hiccups: float = 0.0
    delays: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Packed microbatches; arrays of equal length."""

    tokens: Ints
    sequences: Ints
    sum_sq_len: Ints
    max_len: Ints
    ragged: Floats


def pack(lengths: Ints, budget: int, count: int, rng: np.random.Generator) -> Work:
    """`count` microbatches of documents drawn from `lengths`, each of `budget` tokens at most."""
    documents, bounds = list[int](), [0]
    drawn = _drawn(lengths, rng)
    for _ in range(count):
        left = budget
        while left > budget // 50:
            length = min(next(drawn), left)
            documents.append(length)
            left -= length
        bounds.append(len(documents))
    drawn.close()
    sizes = np.array(documents, np.int64)
    squares = sizes**2
    ragged = squares / (1.0 + 256.0 / sizes)
    return Work(
        tokens=np.add.reduceat(sizes, bounds[:-1]),
        sequences=np.diff(bounds),
        sum_sq_len=np.add.reduceat(squares, bounds[:-1]),
        max_len=np.maximum.reduceat(sizes, bounds[:-1]),
        ragged=np.array([ragged[start:stop].sum() for start, stop in pairwise(bounds)]),
    )


_DRAWN = 256
"""Lengths drawn at once: one alone takes twenty times as long."""


def _drawn(lengths: Ints, rng: np.random.Generator) -> Generator[int, None, None]:
    """Lengths drawn one by one, many at a time. When it is closed, `rng` is where it would be if
    only those that were taken had been drawn."""
    taken = 0
    try:
        while True:
            state, taken = rng.bit_generator.state, 0
            for length in lengths[rng.integers(lengths.size, size=_DRAWN)].tolist():
                taken += 1
                yield length
    finally:
        rng.bit_generator.state = state
        rng.integers(lengths.size, size=taken)


def steps_of(
    job: Job,
    lengths: Sequence[int] | Ints,
    *,
    steps: int,
    seed: int,
    faults: Sequence[Fault] = (),
    surges: Sequence[Surge] = (),
    noise: Noise | None = None,
    first_step: int = 0,
    plan_version: int = 0,
    with_lengths: bool = True,
    coupled: bool = False,
    waits: bool = True,
) -> Iterator[TelemetryBatch]:
    """One batch for each step of `job`, with the records of all ranks.

    `coupled` reports the time of the slowest member of a tensor-parallel group for all of its
    members, as timers around a whole forward pass do; the true slack is in `wait_ms`, which is
    NaN without `waits`. Without `with_lengths` no record says what work it held.
    """
    noise = noise or Noise()
    rng = np.random.default_rng(seed)
    places = RankTable.of(job.layout)
    # A device keeps its offset through changes of the layout, so it is drawn by rank.
    drawn = np.random.default_rng(seed + 1).normal(0.0, 1.0, int(places.ranks.max()) + 1)
    offsets = noise.offset * np.clip(drawn, -2.6, 2.6)  # real ones of 0.7% reach 1.8%
    budget = job.tokens_per_microbatch or 8192
    pool = np.asarray(lengths, np.int64)
    rows = _rows(job, places)
    for step in range(first_step, first_step + steps):
        slower = offsets[places.ranks] + _slower(places, step, faults, noise, rng)
        work = pack(pool, budget, job.microbatches, rng)
        work = _surged(job, work, [surge for surge in surges if surge.from_step <= step])
        times = _times(places, rows, work) * np.exp(slower[rows["at"]])
        _scatter(times, noise, rng)
        slowest = _slowest(rows["group"], times)
        wait = slowest - times if waits else np.full(times.size, np.nan)
        known = {name: getattr(work, name)[rows["work"]] for name in _COLUMNS}
        yield TelemetryBatch(
            rank=places.ranks[rows["at"]].astype(np.int32),
            step=np.full(times.size, step),
            microbatch=rows["microbatch"].astype(np.int32),
            op=rows["op"].astype(np.uint8),
            compute_ms=slowest if coupled else times,
            wait_ms=wait,
            plan_version=plan_version,
            **(known if with_lengths else {}),
        )


_COLUMNS = ("tokens", "sequences", "sum_sq_len", "max_len")


def _slower(
    places: RankTable, step: int, faults: Sequence[Fault], noise: Noise, rng: np.random.Generator
) -> Floats:
    """Extra time of each rank in a step (log), on top of its permanent offset."""
    slower = rng.normal(0.0, noise.step, places.size)
    if noise.hiccups:
        struck = rng.random(places.size) < noise.hiccups
        slower += np.where(struck, np.log(rng.uniform(1.1, 5.0, places.size)), 0.0)
    for fault in faults:
        slower[places.ranks == fault.rank] += np.log(fault.at(step))
    return slower


def _rows(job: Job, places: RankTable) -> dict[str, Ints]:
    """Position, microbatch, op, packed work and tensor-parallel pass of every record of a step."""
    start = np.concatenate([[0], np.cumsum(job.quotas)])
    at, microbatch, op, packed = [], [], [], []
    for replica, quota in enumerate(job.quotas):
        members = np.flatnonzero(places.dp == replica)
        grid = np.meshgrid(members, np.arange(quota), [0, 1], indexing="ij")
        who, which, kind = (axis.reshape(-1) for axis in grid)
        at.append(who)
        microbatch.append(which)
        op.append(np.where(kind == 0, int(Op.FORWARD), int(Op.BACKWARD)))
        packed.append(start[replica] + which)
    names = ("at", "microbatch", "op", "work")
    columns = (np.concatenate(c).astype(np.int64) for c in (at, microbatch, op, packed))
    rows = dict(zip(names, columns, strict=True))
    key = (places.group[rows["at"]] << 24) | (rows["microbatch"] << 1)
    key |= rows["op"] == int(Op.BACKWARD)
    _, rows["group"] = np.unique(key, return_inverse=True)
    return rows


def _surged(job: Job, work: Work, surges: Sequence[Surge]) -> Work:
    """The work of a step with that of some replicas multiplied."""
    if not surges:
        return work
    columns = {name: column.astype(np.float64) for name, column in vars(work).items()}
    start = np.concatenate([[0], np.cumsum(job.quotas)])
    for surge in surges:
        rows = slice(start[surge.replica], start[surge.replica + 1])
        longer = ("sum_sq_len", "max_len", "ragged")
        for name in longer if surge.longer else ("tokens", "sequences", "sum_sq_len", "ragged"):
            columns[name][rows] *= surge.factor
    ragged = columns.pop("ragged")
    return Work(ragged=ragged, **{name: c.astype(np.int64) for name, c in columns.items()})


def _times(places: RankTable, rows: dict[str, Ints], work: Work) -> Floats:
    """True cost in ms of each record on a healthy device."""
    at, which = rows["at"], rows["work"]
    width = places.share[at] * places.layers[at]
    per_layer = 2.0e-4 * work.tokens[which] + 6.0e-8 * work.ragged[which]
    small = 0.02 * places.layers[at] + 0.004 * work.sequences[which] * places.layers[at]
    head = places.last[at] * 4.0e-4 * work.tokens[which] * places.share[at]
    times = per_layer * width + small + head
    result: Floats = times * np.where(rows["op"] == int(Op.BACKWARD), 2.1, 1.0)
    return result


def _scatter(times: Floats, noise: Noise, rng: np.random.Generator) -> None:
    """In place: each record takes a little more or less, a few of them far more."""
    times *= np.exp(rng.normal(0.0, noise.record, times.size))
    struck = rng.random(times.size) < noise.outliers
    times[struck] *= 1.0 + noise.outlier_size * rng.random(int(struck.sum())) * 2.0
    if noise.delays:
        times *= 1.0 + rng.exponential(noise.delays, times.size)


def _slowest(group: Ints, times: Floats) -> Floats:
    """Time of the slowest member of the group of each record."""
    longest = np.zeros(int(group.max()) + 1)
    np.maximum.at(longest, group, times)
    return longest[group]


@dataclass(frozen=True, kw_only=True)
class SlowGroup:
    """The collectives of a group take `factor` times as long from a step on.

    within_step  those of the step (among replicas); else those within microbatches
    """

    ranks: tuple[int, ...]
    factor: float
    from_step: int
    within_step: bool = False


def collectives(
    job: Job, computed: TelemetryBatch, *, seed: int, slow: SlowGroup | None = None
) -> TelemetryBatch:
    """The collectives that belong to a step's compute records: one for each, in which the group
    waits for its slowest member, and one of each rank for the step; times vary by 5%."""
    step = int(computed.step[0])
    rng = np.random.default_rng((seed, step))
    places = RankTable.of(job.layout)
    at = places.index(computed.rank.astype(np.int64))
    group = (places.group[at] << 24) | (computed.microbatch.astype(np.int64) << 1) | computed.op
    _, group = np.unique(group, return_inverse=True)
    inner = (2.0 * rng.lognormal(0.0, 0.05, int(group.max()) + 1))[group]
    place = np.unique(np.stack([places.pp, places.slot]), axis=1, return_inverse=True)[1]
    outer = (30.0 * rng.lognormal(0.0, 0.05, int(place.max()) + 1))[place.reshape(-1)]
    if slow is not None and step >= slow.from_step:
        times, ranks = (outer, places.ranks) if slow.within_step else (inner, computed.rank)
        times[np.isin(ranks, slow.ranks)] *= slow.factor
    wait = np.concatenate([np.nan_to_num(computed.wait_ms), rng.exponential(5.0, places.size)])
    whole = np.full(places.size, -1)
    return TelemetryBatch(
        rank=np.concatenate([computed.rank, places.ranks]),
        step=np.full(wait.size, step),
        microbatch=np.concatenate([computed.microbatch, whole]),
        op=np.full(wait.size, int(Op.COLLECTIVE)),
        compute_ms=np.concatenate([inner, outer]),
        wait_ms=wait,
        plan_version=computed.plan_version,
    )


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Transfers between two ranks take `factor` times as long in [from_step, until_step)."""

    ranks: tuple[int, int]
    factor: float
    from_step: int
    until_step: int = 1 << 40

    def at(self, step: int, ranks: set[int]) -> float:
        """The factor between `ranks` in a step."""
        is_slow = ranks == set(self.ranks) and self.from_step <= step < self.until_step
        return self.factor if is_slow else 1.0


def transfers(
    job: Job,
    computed: TelemetryBatch,
    *,
    seed: int,
    slow: SlowLink | None = None,
    ms: float = 2.0,
    blocking: bool = False,
    clock_spread_ms: float = 0.0,
) -> TelemetryBatch:
    """The transfers between the stages that belong to a step's compute records, as both ends stamp
    them while the pipelines of the replicas are replayed; without tensor parallelism or chunks.

    A transfer takes `ms`, give or take 5%, and one in fifty up to twice as long.

    blocking         both ends wait for each other and time all of it; else the sender says only
                     when it started, and what it sent arrives whether or not the receiver waits
    clock_spread_ms  largest distance of a rank's clock from the true time, in the beginning; the
                     clocks drift by up to 50 millionths
    """
    step = int(computed.step[0])
    rng = np.random.default_rng((seed, step, 1))
    rows: list[_Stamp] = []
    orders = job_orders(job, job.quotas)
    for replica, quota, own in zip(job.layout.replicas, job.quotas, orders, strict=True):
        ranks = [stage.ranks[0] for stage in replica.stages]
        delays = ms * rng.lognormal(0.0, 0.05, (2, len(ranks), quota))
        delays *= np.where(rng.random(delays.shape) < 0.02, rng.uniform(1, 2, delays.shape), 1.0)
        for link, ends in enumerate(pairwise(ranks)):
            delays[:, link] *= 1.0 if slow is None else slow.at(step, set(ends))
        rows += _stamps(own, computed, ranks, delays, blocking=blocking)
    rank, peer, microbatches, starts, held_ms = (np.array(c) for c in zip(*rows, strict=True))
    drawn = np.random.default_rng((seed, 2)).uniform(-1.0, 1.0, (2, max(job.layout.ranks) + 1))
    offsets, drifts = drawn[0] * clock_spread_ms, drawn[1] * 5e-5
    return TelemetryBatch(
        rank=rank,
        peer=peer,
        step=np.full(rank.size, step),
        microbatch=microbatches,
        op=np.full(rank.size, int(Op.P2P)),
        compute_ms=held_ms,
        start_ms=(starts + 1e4 * step) * (1.0 + drifts[rank]) + offsets[rank],
        plan_version=computed.plan_version,
    )


_Stamp = tuple[int, int, int, float, float]
"""Rank, peer, microbatch, and the start and the length of its block in ms of the step."""


def _stamps(
    orders: Sequence[Sequence[Pass]],
    computed: TelemetryBatch,
    ranks: Sequence[int],
    delays: Floats,
    *,
    blocking: bool,
) -> Iterator[_Stamp]:
    """Both ends of the transfers of a replica; `delays` has the shape [2, link, microbatch]."""
    quota = delays.shape[2]
    spent = _durations(computed, ranks, quota)
    durations = [
        [float(spent[stage, int(item.op), item.microbatch]) for item in order]
        for stage, order in enumerate(orders)
    ]
    played = replay(orders, durations, p2p=delays, blocking=blocking)
    at = [{(item.op, item.microbatch): i for i, item in enumerate(order)} for order in orders]
    links = [(Op.FORWARD, s, s, s + 1) for s in range(len(ranks) - 1)]
    links += [(Op.BACKWARD, s, s + 1, s) for s in range(len(ranks) - 1)]
    for (op, link, source, target), microbatch in product(links, range(quota)):
        before = at[target][op, microbatch] - 1
        ready = float(played.ends[target][before]) if before >= 0 else 0.0
        sent = float(played.ends[source][at[source][op, microbatch]])
        delay = float(delays[int(op), link, microbatch])
        over = max(ready, sent) + delay if blocking else max(ready, sent + delay) + 0.01
        yield ranks[source], ranks[target], microbatch, sent, over - sent if blocking else 0.0
        yield ranks[target], ranks[source], microbatch, ready, over - ready


def _durations(computed: TelemetryBatch, ranks: Sequence[int], quota: int) -> Floats:
    """Times of the passes of some ranks, [rank, forward or backward, microbatch]."""
    spent = np.zeros((max(ranks) + 1, 2, quota))
    rows = np.isin(computed.rank, ranks)
    at = computed.rank[rows], computed.op[rows], computed.microbatch[rows]
    spent[at] = computed.compute_ms[rows]
    result: Floats = spent[list(ranks)]
    return result
