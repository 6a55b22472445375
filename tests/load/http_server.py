"""A server for the polite requests of the preflight: answers are functions from path and body."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from load.connection import Target

Answer = tuple[int, object]
Rule = Callable[[str, dict[str, Any], str | None], Answer]
"""(path, body, Authorization) -> (status, JSON, or HTML as a string)."""


@contextmanager
def answering(rule: Rule) -> Iterator[Target]:
    """Serve `rule` on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            status, value = rule(self.path, body, self.headers["authorization"])
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "text/html" if isinstance(value, str) else "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Target(host="127.0.0.1", port=server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
