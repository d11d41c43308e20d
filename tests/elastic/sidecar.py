"""A stand-in for the sidecar in a process of its own, which dies at a scripted moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class Sidecar(BaseHTTPRequestHandler):
    """Offers one plan. With `is_torn` it is killed when half of the answer is on its way."""

    protocol_version = "HTTP/1.1"
    plan = b""
    version = 0
    is_torn = False

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        if int(asked["after"][0]) >= self.version:
            time.sleep(min(float(asked["wait"][0]), 0.2))
            self._answer(204, b"")
        else:
            self._answer(200, self.plan)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(202, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.is_torn and body == self.plan:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def main() -> None:
    """`FOLDER PLAN.json whole|torn`: serve, and say in the folder where, under which process id."""
    folder, plan, how = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), sys.argv[3]
    Sidecar.plan, Sidecar.version = plan, json.loads(plan)["version"]
    Sidecar.is_torn = how == "torn"
    with ThreadingHTTPServer(("127.0.0.1", 0), Sidecar) as server:
        (folder / "pid-sidecar").write_text(str(os.getpid()))
        (folder / "url.new").write_text(f"http://127.0.0.1:{server.server_port}")
        (folder / "url.new").rename(folder / "url")  # it is there when it is whole
        server.serve_forever()


if __name__ == "__main__":
    main()
