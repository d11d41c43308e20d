"""Planning outside the worker: processes of their own, which are ended at the time limit."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from resihp.contracts import InfeasibleError

_MOST_PROCESSES = 3
_START_S = 60.0
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from service.worker.plan_processes import serve; serve()"
)


class PlanExecutor(Protocol):
    """Calls a planning function elsewhere, or at once."""

    def submit(self, plan: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        """Start the call `plan(*args, **named)`; its result, later."""

    def close(self) -> None:
        """End all calls."""


class InlineExecutor:
    """Calls in the thread of the caller, without a time limit."""

    def submit(self, plan: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        """Call `plan`; the result is there on return."""
        future: Future[Any] = Future()
        try:
            future.set_result(plan(*args, **named))
        except Exception as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Do nothing: no call is running."""


class ProcessExecutor:
    """Calls in processes, each of which serves one call at a time and then the next.

    A call that takes longer than `time_limit_s`, not counting the start of its process, ends with
    `TimeoutError`, and its process is killed. One whose process dies ends with `InfeasibleError`.
    Functions and arguments are pickled.
    """

    def __init__(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._threads = ThreadPoolExecutor(_MOST_PROCESSES, thread_name_prefix="plan")
        self._idle: queue.SimpleQueue[_PlanProcess] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[_PlanProcess] = set()
        self._is_closed = False
        # The first plan is often for a lost rank, and should not wait for imports.
        self._idle.put(self._start())

    def submit(self, plan: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        """Start the call; it waits while all processes are busy."""
        return self._threads.submit(self._call, (plan, args, named))

    def _call(self, request: tuple[Any, ...]) -> Any:
        process = self._take()
        try:
            answer = process.call(request, self._time_limit_s)
        except BaseException:
            self._end(process)
            raise
        self._idle.put(process)
        return _result(*answer)

    def _take(self) -> _PlanProcess:
        """An idle process, or a new one where there is none that lives."""
        with contextlib.suppress(queue.Empty):
            while (process := self._idle.get_nowait()).has_ended:
                self._end(process)
            return process
        return self._start()

    def _start(self) -> _PlanProcess:
        with self._lock:
            if self._is_closed:
                raise InfeasibleError("process", "the worker ends")
            process = _PlanProcess()
            self._running.add(process)
            return process

    def _end(self, process: _PlanProcess) -> None:
        process.end()
        process.close()
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        """Kill all processes, which ends their calls."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for process in running:
            process.end()
        self._threads.shutdown(cancel_futures=True)
        for process in running:
            process.close()


class _PlanProcess:
    """A process that serves calls over its standard input and output."""

    def __init__(self) -> None:
        # By path, not with the module of the parent's main program, which may be a user's.
        path = [str(Path(__file__).parents[2]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the worker, which ends this process
        )
        self._is_ready = False

    @property
    def has_ended(self) -> bool:
        """True if it has died, as for want of memory."""
        return self._process.poll() is not None

    def call(self, request: tuple[Any, ...], limit_s: float) -> tuple[str, Any]:
        """Kind and content of the answer. Raises `TimeoutError` and `InfeasibleError`."""
        try:
            if not self._is_ready:
                self._receive(_START_S)
                self._is_ready = True
            assert self._process.stdin is not None
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            answer: tuple[str, Any] = self._receive(limit_s)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise InfeasibleError("process", "the planning process ended") from None
        return answer

    def _receive(self, limit_s: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:  # `select` knows no descriptor above 1023
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                raise TimeoutError
        return pickle.load(stdout)

    def end(self) -> None:
        """Kill the process; a call in another thread then ends."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes, which no call uses any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _result(kind: str, content: Any) -> Any:
    if kind == "infeasible":
        raise InfeasibleError(*content)
    if kind == "error":
        raise RuntimeError(content)
    return content


def serve() -> None:
    """Serve calls until the worker closes the standard input, or is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True)
    reader.start()
    import scheduler  # noqa: F401 - before the first request, which then need not wait for it

    answer: tuple[str, Any] = ("ready", None)
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        plan, args, named = requests.get()
        try:
            answer = ("result", plan(*args, **named))
        except InfeasibleError as error:
            answer = ("infeasible", (error.constraint, error.detail))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answer = ("error", f"{type(error).__name__}: {error}")


def _read_requests(stream: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    """Read requests while a plan is computed too, so that the end of the worker ends that."""
    while True:
        try:
            requests.put(pickle.load(stream))
        except EOFError:
            os._exit(0)
