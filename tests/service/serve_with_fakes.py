"""The `serve` and `worker` commands with the stand-ins of this folder: a process for tests.

From SIGUSR1 on the supervisor's processes hang after 3 s of silence, until SIGUSR2 as before. Its
Redis may be held up by whatever else this machine runs: requests wait for it for a minute.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fakes import FakeDetector, fake_adapters

from service import Settings, app, supervisor
from service.logs import configure_logs
from service.server import serve
from service.worker.loop import work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--no-worker", dest="worker", action="store_false")
    parser.add_argument("--only-worker", action="store_true")
    parser.add_argument("--lease-s", type=float, default=2.0)
    parser.add_argument("--padding", type=int, default=0)
    parser.add_argument("--redis-answer-s", type=float, default=60.0)
    parser.add_argument("--parent", type=int)
    given = vars(parser.parse_args())
    usual_s = supervisor.HUNG_S
    for number, hung_s in (signal.SIGUSR1, 3.0), (signal.SIGUSR2, usual_s):
        signal.signal(number, lambda *_, hung_s=hung_s: setattr(supervisor, "HUNG_S", hung_s))
    FakeDetector.padding = given.pop("padding")
    app._REDIS_ANSWER_S = given.pop("redis_answer_s")
    only_worker = given.pop("only_worker")
    settings = Settings(redis_url=None, commit_every_s=0.2, **given)
    configure_logs(settings)
    if not only_worker:
        serve(settings, fake_adapters)
        return
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    work(settings, stop, fake_adapters)


main()
