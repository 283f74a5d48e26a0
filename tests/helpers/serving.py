"""HTTP servers on the loopback interface."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers that have their length, and no line in the tests' output."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def send_head(self, status: int, size: int, headers: dict[str, str]) -> None:
        """What is sent before `size` bytes of content."""
        self.send_response(status)
        for key, value in {"Content-Length": str(size), **headers}.items():
            self.send_header(key, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """Of 5, the usual size, sixteen connections at once overflow, and each that does waits a second."""


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve until the block ends; gives the address."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
