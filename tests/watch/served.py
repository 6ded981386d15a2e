"""A server in this process, and plain questions to it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from esper.watch.server import ADDRESS, Library, make_app, open_socket


@dataclass(frozen=True)
class Served:
    port: int

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.port}/"

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=10)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    @contextmanager
    def stream(self, path: str, last_id: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
        """Server-sent events as they come: kind, id and data of each."""
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=10)
        try:
            connection.request("GET", path, headers={"Last-Event-ID": last_id} if last_id else {})
            yield _events(connection.getresponse())
        finally:
            connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    while line := answer.readline().decode():
        assert "\r" not in line, "a browser would end the line there"
        key, _, value = line.rstrip("\n").partition(": ")
        if key in ("id", "event"):
            event[key] = value
        elif key == "data":
            event["data"] = json.loads(value)
        elif not key and event:
            yield event
            event = {}


@contextmanager
def serving(*folders: Path, port: int = 0, token: str | None = None) -> Iterator[Served]:
    """The application on a port of its own, until the block ends."""
    listener = open_socket(port)
    server: uvicorn.Server
    app = make_app(Library(folders), lambda: server.should_exit, token)
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
