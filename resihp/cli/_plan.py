"""`resihp plan`: the layout with the shortest step for given device speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps, loads
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import app, parsed, readable, text_of

if TYPE_CHECKING:
    from rich.table import Table

    from resihp.contracts import Job, Plan, Stage
    from scheduler import PlanOption, ReplanDecision

_HELP = """
Plan a **job** for devices of unequal speed. Prints the changes with their reasons, the gain, the
break-even point of the migration, the distance from a certified lower bound, and what this plan
moves, next to the plan that moves least and gives up 1% of the step at most. The `actions` of the
job limit the plan; one that takes on none gets advice on the ranks to leave out.

JOB is a TOML file. SPEEDS is JSON or a JSON file: an object `{"rank": speed}`, or a list with
one speed per rank. 1.0 is healthy (the default), 0.5 half as fast, 0.0 dead. A rank that the job
does not have is a spare, which takes part in a new layout where that gains time.

**Examples**

- `resihp plan job.toml --speeds '{"3": 0.5, "17": 0}'`
- `resihp plan job.toml --speeds speeds.json --json`

Exit status: 0 with a plan, or for a job that takes on none, 1 where none is feasible (with the
binding constraint), 2 with one clear line for input that it cannot read.
"""
_ROWS = 48
_LAST_DIGITS = 1e-9  # in which the simulator and the search may differ
_DIGITS = 12  # of a rank, more than any has


@app.command("plan", help=_HELP)
def plan_command(
    job_file: Annotated[Path, typer.Argument(help="Job description (TOML).", metavar="JOB")],
    speeds: Annotated[str, typer.Option(help="Speeds by rank: JSON, or a file.")] = "{}",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which the best plan so far is taken.")
    ] = None,
) -> None:
    """Read the job, plan it and print the plan."""
    from resihp.contracts import Action, ContractError, InfeasibleError
    from scheduler import parse_job, plan_front
    from scheduler.switching_rule import with_restart

    with readable("plan"):
        job = parsed(job_file, parse_job)
        known = read_speeds(speeds)
        _require_ranks(job, known, is_list=speeds.lstrip().startswith("["))
        if time_limit is not None and not time_limit > 0:
            raise ContractError("time-limit", "must be above 0")
        if job.actions == (Action.NOTIFY,):
            _print_advice(job, known, as_json=json)
            return
        try:
            options: Sequence[PlanOption] = plan_front(job, known, time_limit_s=time_limit)
        except InfeasibleError as error:
            found = {"feasible": False, "constraint": error.constraint, "detail": error.detail}
            words = f"Binding constraint: {error.constraint}; {error.detail}."
            typer.echo(dumps(found) if json else f"No plan is feasible. {words}")
            raise typer.Exit(1) from None
        if Action.LAYOUT not in job.actions:
            options = with_restart(job, options, None)
        (_print_json if json else _print_plan)(job, options, known)


def read_speeds(given: str) -> dict[int, float]:
    """Speeds by rank from JSON text or from the file of that name. Raises `ContractError`."""
    from resihp.contracts import ContractError

    text = given
    if not given.lstrip().startswith(("{", "[")):
        if not Path(given).is_file():
            raise ContractError("speeds", f"{given!r} is neither JSON nor a file")
        text = text_of(Path(given))
    try:
        document = loads(text, object_pairs_hook=tuple)  # keeps a rank that stands twice
    except (ValueError, RecursionError) as error:
        raise ContractError("speeds", f"not valid JSON: {error}") from None
    pairs = tuple(enumerate(document)) if isinstance(document, list) else document
    if not isinstance(pairs, tuple):
        raise ContractError("speeds", "must be an object or a list")
    known: dict[int, float] = {}
    for key, speed in pairs:
        name = str(key)
        if not name.isdecimal() or len(name) > _DIGITS:
            raise ContractError(f"speeds.{name[:_DIGITS]}", "the key must be a rank")
        if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 <= speed < 100:
            raise ContractError(f"speeds.{name}", "must be a speed, at least 0 and below 100")
        if int(name) in known:
            raise ContractError(f"speeds.{name}", "stands twice")
        known[int(name)] = float(speed)
    return known


def _require_ranks(job: Job, speeds: Mapping[int, float], *, is_list: bool) -> None:
    """Raise `ContractError` for a list that is too short, and for a spare that is dead."""
    from resihp.contracts import ContractError
    from resihp.formatting import rank_list

    ranks = job.layout.members
    if is_list and len(speeds) < len(ranks):
        raise ContractError("speeds", f"{len(speeds)} speeds for {len(ranks)} ranks")
    if dead := [rank for rank, speed in speeds.items() if not speed and rank not in ranks]:
        raise ContractError(f"speeds.{dead[0]}", f"the job has no {rank_list(dead)}")


def _unused(job: Job, plan: Plan, speeds: Mapping[int, float]) -> list[str]:
    """Sentence on spares that the plan leaves idle."""
    from resihp.formatting import rank_list

    spares = set(speeds) - job.layout.members - plan.layout.members
    verb = "is a spare" if len(spares) == 1 else "are spares"
    return [f"{rank_list(spares)} {verb}, not used"] if spares else []


def _compare(
    job: Job, options: Sequence[PlanOption], speeds: Mapping[int, float]
) -> tuple[float, ReplanDecision] | None:
    """Step time without a change, and the decision of a running job; None with a dead rank."""
    from resihp.contracts import Action
    from scheduler import SkiRental, simulate
    from scheduler.switching_rule import decide, unplanned, with_restart

    if any(speeds.get(rank, 1.0) <= 0.0 for rank in job.layout.ranks):
        return None
    present_ms = simulate(job, job.layout, job.quotas, speeds).step_ms
    priced = with_restart(job, options, None) if Action.LAYOUT in job.actions else options
    now = unplanned(job, job.layout)
    return present_ms, decide(job, now, priced, speeds, SkiRental(), horizon_steps=None)


def _print_advice(job: Job, speeds: Mapping[int, float], *, as_json: bool) -> None:
    """Print the advice for a job that takes on no plan."""
    from resihp.contracts import to_json
    from scheduler import replan
    from scheduler.switching_rule import unplanned

    decision = replan(job, unplanned(job, job.layout), speeds, step=0)
    advice = decision.advice
    if not as_json:
        none = "; nothing is to be gained" if advice is None else ""
        typer.echo(f"{decision.explanation[0].upper()}{decision.explanation[1:]}{none}.")
        return
    document = {"feasible": True, "plan": None, "explanation": decision.explanation}
    typer.echo(dumps({**document, "advice": None if advice is None else to_json(advice)}))


def _print_json(job: Job, options: Sequence[PlanOption], speeds: Mapping[int, float]) -> None:
    from resihp.contracts import to_json

    plan = options[0].plan
    present_ms, decision = _compare(job, options, speeds) or (None, None)
    best = decision and decision.best
    migration = best and {
        "saved_ms_per_step": best.saved_ms,
        "cost_ms": best.cost_ms,
        "break_even_steps": best.break_even_steps,
    }
    document = {
        "feasible": True,
        "plan": to_json(plan),
        "gap": plan.gap,
        "present_step_ms": present_ms,
        "migration": migration,
        "explanation": decision.explanation if decision and best else None,
        "front": [
            {
                "step_ms": option.plan.step_ms,
                "most_bytes": option.most_bytes,
                "total_bytes": option.total_bytes,
                "migration_ms": option.migration_ms,
                "plan": to_json(option.plan),
            }
            for option in options
        ],
    }
    typer.echo(dumps(document))


def _print_plan(job: Job, options: Sequence[PlanOption], speeds: Mapping[int, float]) -> None:
    from rich.console import Console

    from resihp.contracts import Action
    from scheduler.cost_model import assumed_cost
    from scheduler.reasons import SCHEDULE_NAMES

    plan = options[0].plan
    console = Console()
    console.print(_table(job, plan, speeds))
    for sentence in (*plan.reason, *_unused(job, plan, speeds)):
        console.print(f"• {sentence}", highlight=False)
    console.print()
    compared = _compare(job, options, speeds)
    if compared is None:
        console.print("Without a change the job cannot run.", highlight=False)
    else:
        present_ms, decision = compared
        gain = present_ms / plan.step_ms - 1.0
        if gain < -_LAST_DIGITS:
            compared_to = f"{plan.step_ms / present_ms - 1.0:.1%} slower"
        else:
            compared_to = f"{max(gain, 0.0):.1%} faster"
        console.print(f"Without a change {present_ms:.1f} ms per step; the plan is {compared_to}.")
        if decision.best is not None:
            console.print(f"In a running job {decision.explanation}.", highlight=False)
    if words := assumed_cost(job):
        console.print(words, highlight=False)
    if job.model is not None and Action.LAYOUT in job.actions:
        for sentence in _migrations(options):
            console.print(sentence, highlight=False)
    under = f"[bold]{plan.step_ms:.1f} ms[/bold] under {SCHEDULE_NAMES[plan.schedule]}"
    console.print(
        f"Step {under}; lower bound for these groups and this schedule {plan.bound_ms:.1f} ms "
        f"(gap {plan.gap:.2%})."
    )


def _migrations(options: Sequence[PlanOption]) -> list[str]:
    """Sentences on what the quickest plan moves, and on the one that moves least."""
    from resihp.formatting import byte_size, duration, plural

    def moved(option: PlanOption) -> str:
        each, total = byte_size(option.most_bytes), byte_size(option.total_bytes)
        return f"at most {each} a rank, {total} in all, {duration(option.migration_ms)}"

    quickest, least = options[0], options[-1]
    if not quickest.total_bytes:
        return ["The plan moves nothing."]
    if least is quickest:
        return [f"The plan moves {moved(quickest)}; none that moves less is worth a longer step."]
    slower_ms = least.plan.step_ms - quickest.plan.step_ms
    later = f"{slower_ms / quickest.plan.step_ms:.2%} of the step ({duration(slower_ms)})"
    dearer_ms = quickest.migration_ms - least.migration_ms
    if dearer_ms > 0.0:
        steps = plural(ceil(dearer_ms / slower_ms), "step")
        worth = f"costs {duration(dearer_ms)} and pays after {steps}"
    else:
        worth = "costs no time over these links"
    more = byte_size(quickest.total_bytes - least.total_bytes)
    return [
        f"The plan moves {moved(quickest)}. The one that moves least: {moved(least)}.",
        f"The last {later} moves {more}, which {worth}.",
    ]


def _table(job: Job, plan: Plan, speeds: Mapping[int, float]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from resihp.formatting import inclusive_ranges, ratio

    def named(rank: int) -> str:
        speed = speeds.get(rank, 1.0)
        return str(rank) if speed == 1.0 else f"{rank}({ratio(speed)})"

    table = Table(title=f"{escape(job.name)}, plan {plan.version}", title_justify="left")
    for column in ("replica", "microbatches", "stage", "layers", "ranks", "shares", "was"):
        table.add_column(column, justify="left" if column in ("ranks", "was") else "right")
    before = [stage for replica in job.layout.replicas for stage in replica.stages]
    hidden = 0
    for dp, replica in enumerate(plan.layout.replicas):
        for pp, stage in enumerate(replica.stages):
            old = max(before, key=lambda old: len(set(old.ranks) & set(stage.ranks)))
            changed = _changed(stage, old if set(old.ranks) & set(stage.ranks) else None)
            if table.row_count >= _ROWS or (not changed and len(plan.layout.ranks) > 2 * _ROWS):
                hidden += 1
                continue
            first, quota = (str(dp), str(plan.quotas[dp])) if pp == 0 or hidden else ("", "")
            table.add_row(
                first,
                quota,
                str(pp),
                inclusive_ranges(stage.chunks),
                " ".join(map(named, stage.ranks)),
                ":".join(map(str, stage.shares)) if len(set(stage.shares)) > 1 else "even",
                changed,
                style="yellow" if changed else None,
            )
    if hidden:
        table.caption = f"{hidden} more stages, unchanged or beyond the first {_ROWS}"
    return table


def _changed(stage: Stage, old: Stage | None) -> str:
    """Differences of the old group of these ranks from the stage."""
    from resihp.formatting import inclusive_ranges

    if old is None:
        return "new"
    changes = []
    if old.chunks != stage.chunks:
        changes.append(f"layers {inclusive_ranges(old.chunks)}")
    gone = sorted(set(old.ranks) - set(stage.ranks))
    if gone:
        changes.append(f"with {' '.join(map(str, gone))}")
    elif old.shares != stage.shares:
        changes.append(f"shares {':'.join(map(str, old.shares))}")
    return ", ".join(changes)
