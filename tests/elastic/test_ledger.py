"""What is kept of a step and who computes the rest: each microbatch exactly once, always."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Layout, Plan
from resihp.elastic.microbatches.assignment import divide, full_assignments, remaining_assignments
from resihp.elastic.microbatches.ledger import (
    GradientHolding,
    SurvivingSum,
    indices,
    spans,
    surviving_sums,
)
from resihp.elastic.microbatches.tree_sum import Node, nodes, put

QUOTAS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


def grid(quotas: list[int], version: int = 0) -> Plan:
    layout = Layout.grid(dp=len(quotas), pp=2, tp=1, layers=2)
    return Plan(version=version, layout=layout, quotas=tuple(quotas))


@given(st.sets(st.integers(0, 40)))
def test_spans_and_indices_are_inverse(microbatches: set[int]) -> None:
    assert indices(spans(microbatches)) == tuple(sorted(microbatches))


@given(QUOTAS)
def test_a_whole_step_is_shared_by_quotas(quotas: list[int]) -> None:
    shares = full_assignments(grid(quotas))
    assert [len(share.todo) for share in shares] == quotas
    assert [i for share in shares for i in share.todo] == list(range(sum(quotas)))


@given(QUOTAS, st.data())
def test_what_is_kept_and_what_is_redone_make_the_step(
    quotas: list[int], data: st.DataObject
) -> None:
    """Whichever replicas survive, and however the new plan divides the work."""
    old = grid(quotas)
    alive = data.draw(st.sets(st.sampled_from(range(len(quotas)))))
    held = full_assignments(old)
    kept = [SurvivingSum(r, held[r].whole) for r in sorted(alive) if held[r].whole]
    dp = data.draw(st.integers(1, 4))
    cuts = sorted(
        data.draw(st.lists(st.integers(0, old.microbatches), min_size=dp - 1, max_size=dp - 1))
    )
    new = [b - a for a, b in zip([0, *cuts], [*cuts, old.microbatches], strict=True)]
    shares = remaining_assignments(grid(new, 1), old.layout, kept)
    counted = [i for share in shares for i in indices(share.whole)]
    assert sorted(counted) == list(range(old.microbatches))
    assert sorted(one.replica for share in shares for one in share.inherited) == [
        one.replica for one in kept
    ]
    assert all(len(share.todo) <= quota for share, quota in zip(shares, new, strict=True))


@given(QUOTAS, st.data())
def test_the_rest_ends_as_early_as_any_division(quotas: list[int], data: st.DataObject) -> None:
    """Moving one microbatch elsewhere never makes the last replica end earlier."""
    plan = grid(quotas)
    count = data.draw(st.integers(0, plan.microbatches))
    given_ = divide(plan, count)
    assert sum(given_) == count

    def end(of: list[int]) -> float:
        return max((n + 1) / (q + 1) if n else 0.0 for n, q in zip(of, quotas, strict=True) if q)

    for source in range(len(quotas)):
        for target in range(len(quotas)):
            if source != target and given_[source] and quotas[target]:
                other = list(given_)
                other[source] -= 1
                other[target] += 1
                assert end(other) >= end(list(given_)) - 1e-12


@given(st.integers(1, 40).flatmap(lambda n: st.permutations(range(n))))
def test_a_tree_adds_up_in_one_order_whoever_comes_first(order: list[int]) -> None:
    held: dict[Node, str] = {}
    for leaf in order:
        put(held, (leaf, leaf + 1), str(leaf), len(order), lambda left, right: f"({left} {right})")
    again: dict[Node, str] = {}
    for leaf in range(len(order)):
        put(again, (leaf, leaf + 1), str(leaf), len(order), lambda left, right: f"({left} {right})")
    assert held == again
    assert list(held) == [(0, len(order))]


@given(st.integers(1, 64), st.data())
def test_consecutive_leaves_are_few_nodes(leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, leaves - 1))
    stop = data.draw(st.integers(start + 1, leaves))
    held = nodes(range(start, stop), leaves)
    assert [i for node in held for i in range(*node)] == list(range(start, stop))
    assert len(held) <= 2 * max(1, (stop - start).bit_length())


REPORTS = st.lists(
    st.builds(
        GradientHolding,
        generation=st.just(0),
        replica=st.integers(0, 2),
        members=st.just(2),
        finished=st.sampled_from([(), ((0, 1),), ((0, 2),)]),
        summed=st.booleans(),
    ),
    max_size=6,
)


@given(REPORTS)
def test_only_sums_that_all_ranks_of_a_replica_agree_on_are_kept(
    holdings: list[GradientHolding],
) -> None:
    for kept in surviving_sums(holdings, 6):
        held = [holding for holding in holdings if holding.replica == kept.replica]
        assert len(held) == 2
        if kept.total:
            assert all(holding.summed for holding in held)
        else:
            assert {holding.finished for holding in held} == {kept.finished}


@given(REPORTS)
def test_a_sum_over_all_replicas_is_kept_alone(holdings: list[GradientHolding]) -> None:
    kept = surviving_sums(holdings, 6)
    assert len(kept) <= 1 or not any(one.total for one in kept)
