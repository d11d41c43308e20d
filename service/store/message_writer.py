"""Messages on their way to Redis, together in as few round trips as the load asks for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from .schema import INGEST

_MOST_BYTES = 8 << 20
"""Size of the messages of one round trip, from which on the others wait for the next."""


class _Waiting(NamedTuple):
    command: tuple[str | bytes | int, ...]
    size: int
    answer: asyncio.Future[Any]


class MessageWriter:
    """Runs the script `INGEST` for each message.

    One alone is written at once. Those that arrive during a round trip are written together in the
    next one, which costs them and Redis a small part of what single ones do.
    """

    def __init__(self, client: Any) -> None:
        self._redis = client
        self._script = client.register_script(INGEST)
        self._waiting = deque[_Waiting]()
        self._task: asyncio.Task[None] | None = None

    async def write(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """The answer of the script. Raises `redis.RedisError`."""
        command = ("EVALSHA", self._script.sha, len(keys), *keys, *args)
        size = sum(len(arg) for arg in args if isinstance(arg, bytes))
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(command, size, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._write_all())
        return await answer

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write(self._next())
        finally:
            self._task = None

    def _next(self) -> list[_Waiting]:
        taken, size = list[_Waiting](), 0
        while self._waiting and size < _MOST_BYTES:
            taken.append(self._waiting.popleft())
            size += taken[-1].size
        return taken

    async def _write(self, messages: list[_Waiting]) -> None:
        try:
            answers = await self._carried_out(messages)
            unknown = [at for at, answer in enumerate(answers) if _is_unknown_script(answer)]
            if unknown:  # Redis was started again, or flushed; the others are written
                await self._redis.script_load(INGEST)
                repeated = await self._carried_out([messages[at] for at in unknown])
                for at, answer in zip(unknown, repeated, strict=True):
                    answers[at] = answer
        except Exception as error:  # noqa: BLE001 each request raises it, and none waits for ever
            answers = [error] * len(messages)
        for message, answer in zip(messages, answers, strict=True):
            if message.answer.done():
                continue
            if isinstance(answer, Exception):
                message.answer.set_exception(answer)
            else:
                message.answer.set_result(answer)

    async def _carried_out(self, messages: list[_Waiting]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for message in messages:
                pipe.execute_command(*message.command)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            return answers


def _is_unknown_script(answer: Any) -> bool:
    return isinstance(answer, redis.exceptions.NoScriptError)
