"""Numbers, durations, sizes, counts and lists of ranks as text: one spelling in every surface.

Pure functions without dependencies, for messages, terminals, reports and benchmark tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

NOT_MEASURED = "–"


def duration(ms: float | None) -> str:
    """Milliseconds with three significant digits in ms, s, or minutes; a dash for None.

    >>> duration(4.1712), duration(417.12), duration(4171.2), duration(417_120.0), duration(None)
    ('4.17 ms', '417 ms', '4.17 s', '6 min 57 s', '–')
    """
    if ms is None:
        return NOT_MEASURED
    if ms < 999.5:
        return f"{_three_digits(ms)} ms"
    if ms < 119_500:
        return f"{_three_digits(ms / 1e3)} s"
    minutes, seconds = divmod(round(ms / 1e3), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def byte_size(count: float) -> str:
    """Bytes in binary units with three significant digits.

    >>> byte_size(0), byte_size(1023), byte_size(1536), byte_size(5.2 * 2**30)
    ('0 B', '1023 B', '1.5 KiB', '5.2 GiB')
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 999.5:
            return f"{_three_digits(count)} {unit}"
    return f"{_three_digits(count / 1024)} TiB"


def percent(share: float) -> str:
    """A probability as a percentage; only certainty prints as 0% or 100%.

    >>> percent(1.0), percent(0.999), percent(0.42), percent(0.001), percent(0.0)
    ('100%', '>99%', '42%', '<1%', '0%')
    """
    if share in (0.0, 1.0) or 0.01 <= share <= 0.99:
        return f"{share:.0%}"
    return ">99%" if share > 0.5 else "<1%"


def ratio(value: float) -> str:
    """A factor such as a slowdown.

    >>> ratio(1.5), ratio(12.3456)
    ('1.50x', '12.35x')
    """
    return f"{value:.2f}x"


def plural(number: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "step"), plural(3, "step"), plural(2, "microbatch"), plural(1200, "rank")
    ('1 step', '3 steps', '2 microbatches', '1,200 ranks')
    """
    return f"{number:,} {noun_for(number, noun)}"


def noun_for(number: int, noun: str) -> str:
    """The noun in the grammatical number of the count.

    >>> noun_for(1, "layer"), noun_for(0, "match"), noun_for(2, "change of layout")
    ('layer', 'matches', 'changes of layout')
    """
    if number == 1:
        return noun
    if " of " in noun:
        head, _, rest = noun.partition(" of ")
        return f"{noun_for(number, head)} of {rest}"
    return f"{noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{noun}s"


def listed(items: Iterable[object], most: int = 12) -> str:
    """Items joined by commas and `and`; beyond `most` items the number of the others.

    >>> listed([1]), listed([1, 2]), listed("abc"), listed(range(9), most=3), listed([])
    ('1', '1 and 2', 'a, b and c', '0, 1, 2 and 6 more', '')
    """
    names = [str(item) for item in items]
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def rank_list(ranks: Iterable[int], most: int = 12) -> str:
    """Global ranks in ascending order with their noun.

    >>> rank_list([5]), rank_list({3, 2}), rank_list([]), rank_list(range(64), most=2)
    ('rank 5', 'ranks 2 and 3', 'no rank', 'ranks 0, 1 and 62 more')
    """
    ordered = sorted(ranks)
    return f"{noun_for(len(ordered), 'rank')} {listed(ordered, most)}" if ordered else "no rank"


def ended_early(last_step: Mapping[int, int]) -> list[str]:
    """Clauses on ranks whose records end, by the last step of each.

    >>> ended_early({2: 52, 7: 9, 3: 52})
    ['rank 7 has no records after step 9', 'ranks 2 and 3 have no records after step 52']
    """
    found = []
    for step in sorted(set(last_step.values())):
        ranks = [rank for rank, last in last_step.items() if last == step]
        verb = "has" if len(ranks) == 1 else "have"
        found.append(f"{rank_list(ranks)} {verb} no records after step {step}")
    return found


def rank_span(ranks: Sequence[int]) -> str:
    """Ascending ranks as a short axis label.

    >>> rank_span((4,)), rank_span((4, 5)), rank_span((4, 5, 6, 7)), rank_span((0, 8, 16))
    ('4', '4, 5', '4-7', '0, …, 16')
    """
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    contiguous = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}{'-' if contiguous else ', …, '}{ranks[-1]}"


def numbers(values: Sequence[object], most: int = 32) -> str:
    """Values in their own order, separated by commas, shortened beyond `most`.

    >>> numbers([3, 2, 3]), numbers(range(9), most=4)
    ('3, 2, 3', '0, 1, 2, 3, …')
    """
    return ", ".join(map(str, values[:most])) + (", …" if len(values) > most else "")


def inclusive_ranges(half_open: Iterable[tuple[int, int]]) -> str:
    """Half-open ranges as text with both ends included; empty ranges are left out.

    >>> inclusive_ranges([(0, 4), (8, 9), (12, 12)]), inclusive_ranges([])
    ('0-3, 8', 'none')
    """
    held = [(start, stop - 1) for start, stop in half_open if stop > start]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in held) or "none"


def grid(dp: int, pp: int, tp: int) -> str:
    """The degrees of data, pipeline and tensor parallelism.

    >>> grid(2, 4, 1)
    'DP2 × PP4 × TP1'
    """
    return f"DP{dp} × PP{pp} × TP{tp}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
