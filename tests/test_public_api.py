"""The names that users may import; the docs import no others."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = Path(__file__).with_name("public_api.json")
PACKAGES = (
    "resihp",
    "resihp.hooks",
    "resihp.contracts",
    "resihp.elastic",
    "resihp.checkpoint",
    "resihp.offline",
    "detector",
    "scheduler",
    "service",
    "resihp.integrations.transformers",
    "resihp.integrations.accelerate",
    "resihp.integrations.lightning",
    "resihp.integrations.megatron",
    "resihp.integrations.ray",
    "resihp.integrations.ray_launch",
    "resihp.integrations.torchtitan",
    "resihp.integrations.deepspeed",
    "resihp.testing",
)
ON_PURPOSE = (
    "If that is on purpose, run `python -m tests.test_public_api`, which rewrites "
    "tests/public_api.json, and say so in the commit message."
)
_OURS = re.compile(r"(resihp|detector|scheduler|service)\b")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^[+ >.]*(?:from ([\w.]+) import|import ([\w.]+))", re.MULTILINE)


def exported() -> dict[str, list[str]]:
    """The exported names of each package."""
    return {name: sorted(importlib.import_module(name).__all__) for name in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_exported_names_are_those_that_were_agreed(package: str) -> None:
    agreed = set(json.loads(NAMES.read_text())[package])
    found = set(importlib.import_module(package).__all__)
    added, removed = sorted(found - agreed), sorted(agreed - found)
    assert found == agreed, f"{package}: {added} added, {removed} removed. {ON_PURPOSE}"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_exported_name_exists_and_is_listed_once(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        getattr(module, name)


def imports(text: str) -> set[tuple[str, str]]:
    """Modules of ours that the code blocks of a page import, with the name taken from each."""
    found: set[tuple[str, str]] = set()
    for language, block in _FENCE.findall(text):
        try:
            nodes = list(ast.walk(ast.parse(block))) if language == "python" else []
        except SyntaxError as error:
            raise AssertionError(f"not Python: {error}\n{block}") from None
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names}
        if language != "python":
            found |= {(one or other, "") for one, other in _IMPORT.findall(block)}
    return {(module, name) for module, name in found if _OURS.match(module)}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_import_from_the_public_packages_only(page: Path) -> None:
    for module, name in sorted(imports(page.read_text())):
        assert module in PACKAGES, f"{page.name} imports {name or module} from {module}"
        if name and name not in importlib.import_module(module).__all__:
            inner = f"{module}.{name}"
            assert inner in PACKAGES, f"{page.name} imports {name}, not exported by {module}"


def test_imports_of_a_page_are_found() -> None:
    page = """
```python
from detector import Detector
def f():
    import scheduler.search
```
```diff
+ import resihp
- from service.app import create_app
```
```console
$ python -c "import numpy"
```
"""
    assert imports(page) == {("detector", "Detector"), ("scheduler.search", ""), ("resihp", "")}


if __name__ == "__main__":
    NAMES.write_text(json.dumps(exported(), indent=1) + "\n")
