"""The state of a rank changes through its own methods, along the table of phases."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import resihp.elastic
from resihp.contracts import Layout, Plan
from resihp.elastic.state.phases import ALLOWED, Phase
from resihp.elastic.state.runtime_state import RuntimeState

LAYOUT = Layout.grid(dp=1, pp=1, tp=1, layers=4)
FIRST, SECOND = (Plan(version=version, layout=LAYOUT, quotas=(2,)) for version in range(2))


def generation(**more: Any) -> Any:
    return SimpleNamespace(**{"number": 1, "plan": SECOND, "rewound": None, **more})


class Build:
    """Takes the place of a generation that is being built."""

    is_built = is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_committed_generation_replaces_the_present_one() -> None:
    state, build, engine = RuntimeState(FIRST), Build(), SimpleNamespace()
    state.prepare(build)
    state.vote(generation())
    state.pause()
    state.commit(generation(), engine)
    assert (state.generation, state.plan, state.engine) == (1, SECOND, engine)
    assert (state.preparing, state.in_doubt, state.paused_at) == (None, None, None)
    assert not build.is_cancelled


def test_an_aborted_generation_changes_nothing_else() -> None:
    state, build = RuntimeState(FIRST), Build()
    state.resume(3)
    state.prepare(build)
    state.vote(generation())
    state.abort()
    assert build.is_cancelled
    assert (state.preparing, state.in_doubt) == (None, None)
    assert (state.generation, state.plan, state.completed) == (0, FIRST, 3)


def test_a_generation_from_a_checkpoint_continues_at_its_step() -> None:
    state = RuntimeState(FIRST)
    state.reduced(6, 1.5)
    state.resume(7)
    state.commit(generation(rewound=4), None)
    assert (state.completed, state.norm) == (4, None)


def test_phases_follow_the_table() -> None:
    seen: list[tuple[Phase, int]] = []
    state = RuntimeState(FIRST, lambda phase, step: seen.append((phase, step)))
    state.enter(Phase.ACCUMULATING)
    assert seen == [(Phase.ACCUMULATING, 0)]
    for phase in set(Phase) - ALLOWED[Phase.ACCUMULATING]:
        with pytest.raises(AssertionError, match="accumulating ->"):
            state.enter(phase)
    assert state.phase is Phase.ACCUMULATING


def test_no_other_module_writes_the_state() -> None:
    names = set(vars(RuntimeState(FIRST))) - {"_on_phase"}
    root = Path(resihp.elastic.__file__).parent
    for path in (*root.glob("*.py"), *root.glob("planning/*.py"), *root.glob("reshard/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
            targets += node.targets if isinstance(node, ast.Assign) else []
            for target in (part for one in targets for part in ast.walk(one)):
                if isinstance(target, ast.Attribute) and target.attr in names:
                    owner = ast.unparse(target.value)
                    assert "state" not in owner, f"{path.name}:{node.lineno} {owner}.{target.attr}"
