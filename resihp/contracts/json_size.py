"""JSON of bounded size: what a document would become is known before it is parsed."""

from __future__ import annotations

import json
from typing import Any

from .errors import ContractError


def parse_json(document: bytes, *, parts: int, values: int) -> Any:
    """The content of a JSON document. Raises `ContractError`; `parts`, `values` as for
    `require_size`."""
    require_size(document, parts=parts, values=values)
    try:
        return json.loads(document)
    except (ValueError, RecursionError) as error:
        raise ContractError("", f"is not valid JSON: {error}") from None


def require_size(document: bytes, *, parts: int, values: int) -> None:
    """Check that a JSON document stays small once it is parsed. Raises `ContractError`.

    parts   most marks of lists, objects, names and strings: `[`, `{`, `:` and `"`
    values  most commas, hence about the most values

    An empty list of three bytes becomes an object of sixty, so both are counted in the bytes; what
    stands inside of strings counts too.
    """
    if sum(map(document.count, (b"[", b"{", b":", b'"'))) > parts:
        raise ContractError("", f"holds more than {parts} brackets, colons and quotes")
    if document.count(b",") > values:
        raise ContractError("", f"holds more than {values} values")
