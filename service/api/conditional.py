"""Conditional reads: a client that has the present answer is told so instead (304)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Header, Response


class KnownAnswers:
    """Tags of the answers that a client has, from `If-None-Match`."""

    def __init__(self, if_none_match: Annotated[str, Header()] = "") -> None:
        given = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        self._tags = frozenset(tag.strip('"') for tag in given)

    async def answer(self, tag: str, content: Callable[[], Awaitable[bytes]]) -> Response:
        """The JSON of `content` with its tag, or 304 without making it if the client has it.

        The content must not be older than the tag.
        """
        headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
        if tag in self._tags:
            return Response(status_code=304, headers=headers)
        return Response(await content(), media_type="application/json", headers=headers)


Known = Annotated[KnownAnswers, Depends()]

CONDITIONAL: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"content": {"application/json": {}}},
        304: {"description": "unchanged since the answer with the `ETag` in `If-None-Match`"},
    },
}
"""Options of a route whose answers have tags."""
