"""The law of names of CONTRIBUTING.md, as far as a test can hold it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("resihp", "detector", "scheduler", "service")

NO_FIRST_WORD = {
    *("as", "how", "if", "it", "its", "nobody", "nothing", "so", "that", "they", "this", "those"),
    *("what", "when", "where", "whether", "which", "who", "whoever", "whose", "why"),
}
METAPHORS = {
    *("agent", "bell", "carrier", "cascade", "copies", "courier", "cubes", "descent", "disposal"),
    *("door", "draft", "heir", "house", "inherit", "judge", "keeper", "mailbox", "meeting"),
    *("neighbours", "newcomers", "parcel", "parcels", "refusals", "rental", "roster", "seat"),
    *("story", "together", "turns", "watch", "witnesses", "words", "world", "worlds"),
}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT)


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse((ROOT / path).read_text()) for path in modules()}


def test_public_class_names_are_unique():
    found = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path))
    found.pop("ResiHPCallback")  # one a trainer, by which users know them
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_docstrings_start_with_a_verb_or_a_noun():
    wrong = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "Text").split()
                if text and text[0].lower().strip("`'\",.;:") in NO_FIRST_WORD:
                    wrong.append(f"{path}:{getattr(node, 'lineno', 1)}: {' '.join(text[:8])}")
    assert wrong == []


def test_modules_have_no_private_metaphors():
    wrong = [
        str(path)
        for path in modules()
        if METAPHORS & {part.strip("_") for part in path.with_suffix("").parts}
    ]
    assert wrong == []
