"""The server of the page: it reads run folders and changes nothing. It serves this machine, or clients
that have a token. A run is asked for by its name in the library, never by a path.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esper.runs.files import file_in
from esper.runs.schema import json_values
from esper.runs.trajectories import TrajectoryFolder
from esper.utils.errors import UserError
from esper.utils.launch import interruptible
from esper.watch.facts import facts, signature, state
from esper.watch.reading import Position, read_new_lines, round_events

ADDRESS = "127.0.0.1"
MADE_BY = "'esper train' and esper.grow(..., out='runs/mine') make a run"
USUAL_PORT = 8642
_MAX_DEPTH = 2  # how far below a given folder runs are looked for
_MAX_RUNS = 500  # runs that are listed
POLL = 0.2  # seconds between two reads of the files
_LIST_EVERY = 2.0  # seconds between two searches for new runs
_KEEP_ALIVE = 15.0  # seconds without an event after which a comment is sent, to notice a dead connection
_HOSTS = [ADDRESS, "localhost"]
_POLICY = b"default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Library:
    """The runs in some folders, each by a name that is unique among them.

    A given folder is a run itself, or holds runs up to two folders below. Runs that appear later are found
    when `runs` is asked again. Raises `UserError` for a folder that does not exist.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"there is no folder at {folder}; give one that holds runs: {MADE_BY}")
        self._roots = list(dict.fromkeys(folder.resolve() for folder in folders))

    def runs(self) -> dict[str, Path]:
        """Return name → folder, in the order in which the folders were given, then by name."""
        found: dict[str, Path] = {}
        for root in self._roots:
            for folder in _find_runs(root, root, _MAX_DEPTH):
                if folder not in found.values() and len(found) < _MAX_RUNS:
                    name = root.name if folder == root else folder.relative_to(root).as_posix()
                    longer = (name, f"{folder.parent.name}/{folder.name}", str(folder))
                    found[next(n for n in longer if n not in found)] = folder
        return found

    def find(self, name: str) -> Path:
        """Return the folder of a run. Raises `UserError` for a name that is not in `runs`."""
        runs = self.runs()
        if name not in runs:
            raise UserError(f"there is no run {name!r} here")
        return runs[name]


def _find_runs(root: Path, folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs at `folder` or below it; links that lead out of `root` are skipped."""
    try:
        resolved = folder.resolve()
        if not resolved.is_relative_to(root):
            return
        if (folder / "versions.json").is_file():
            yield resolved
        elif depth:
            for child in sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")):
                yield from _find_runs(root, child, depth - 1)
    except OSError:  # not readable, or removed meanwhile
        return


def make_app(
    library: Library, stopping: Callable[[], bool] = lambda: False, token: str | None = None
) -> Starlette:
    """Return the application.

    stopping: whether streams shall end. token: with one, only requests that have it are answered; without,
    only requests to this machine by name.
    """

    def run_of(request: Request) -> Path:
        return library.find(request.query_params.get("run", ""))

    def number_of(request: Request, name: str) -> int:
        text = request.query_params.get(name)
        if text is None or not text.isdecimal() or len(text) > 9:
            raise UserError(f"{name} is {text!r}; give a whole number")
        return int(text)

    # Starlette runs functions that are not async, which read files, in threads.
    def list_runs(request: Request) -> Response:
        return JSONResponse(_list_runs(library))

    def read_facts(request: Request) -> Response:
        return JSONResponse(json_values(facts(run_of(request))))

    def read_events(request: Request) -> Response:
        member = number_of(request, "member") if "member" in request.query_params else None
        found = round_events(file_in(run_of(request), "events.jsonl"), number_of(request, "round"), member)
        return JSONResponse(json_values(found))

    def read_trajectories(request: Request) -> Response:
        data = TrajectoryFolder(run_of(request)).read_bytes(number_of(request, "round"))
        return Response(data, media_type="application/octet-stream")

    async def stream(request: Request) -> Response:
        """Stream the rounds of some runs from the positions that the page has reached.

        The id of every event is the position in all files; a browser that was disconnected sends the last one
        back, so that nothing is sent twice.
        """
        names = request.query_params.getlist("run")
        last = request.headers.get("last-event-id")
        begun = last.split(",") if last else request.query_params.getlist("at")
        runs = {name: await run_in_threadpool(library.find, name) for name in names}
        begun += [""] * (len(names) - len(begun))  # runs that the page has not asked for before
        at = {name: Position.parse(text) for name, text in zip(names, begun, strict=False)}
        return StreamingResponse(_stream_events(library, runs, at, stopping), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/api/runs", list_runs),  # each with its state
            Route("/api/facts", read_facts),  # what a run is: settings, results, rounds with trajectories
            Route("/api/events", read_events),  # of one round
            Route("/api/trajectories", read_trajectories),  # the slots of one round, as the file has them
            Route("/api/stream", stream),  # the rounds as they are written, as server-sent events
            Mount("/", StaticFiles(packages=[("esper.watch", "page")], html=True)),
        ],
        exception_handlers={UserError: lambda _, error: JSONResponse({"error": str(error)}, 404)},
        middleware=[
            Middleware(_with_headers),
            # Another site may point a name of its own at loopback, but it does not know the token.
            Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)
            if token is None
            else Middleware(_with_token, token=token),
        ],
    )


def _list_runs(library: Library) -> list[dict[str, Any]]:
    return [{"name": name, "state": state(run)} for name, run in library.runs().items()]


async def _stream_events(
    library: Library, runs: dict[str, Path], at: dict[str, Position], stopping: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield server-sent events: `facts` that changed, new `rounds`, and `runs` that came or went."""
    signatures = {name: "" for name in runs}
    listed, listed_at, sent_at = "", 0.0, time.monotonic()
    yield "retry: 500\n\n"
    while not stopping():
        events: list[str] = []
        busy = False
        for name, run in runs.items():
            signature_now = await run_in_threadpool(signature, run)
            if signature_now != signatures[name]:
                signatures[name] = signature_now
                events.append(_event("facts", at, json.dumps({"run": name, "signature": signature_now})))
            chunk = await run_in_threadpool(_read_rounds, run, at[name])
            if chunk is not None:
                at[name], busy = chunk.position, True
                head = {"run": name, "at": str(chunk.position), "restarted": chunk.restarted}
                head["damaged"] = chunk.damaged
                # The lines are JSON already: parsing them again would cost more than all the rest.
                text = f'{json.dumps(head)[:-1]}, "lines": [{",".join(chunk.lines)}]}}'
                events.append(_event("rounds", at, text))
        if time.monotonic() - listed_at > _LIST_EVERY:
            listed_at, now = time.monotonic(), json.dumps(await run_in_threadpool(_list_runs, library))
            if now != listed:
                listed = now
                events.append(_event("runs", at, now))
        if not events and time.monotonic() - sent_at > _KEEP_ALIVE:
            events.append(": still here\n\n")
        for event in events:
            sent_at = time.monotonic()
            yield event
        if not busy:
            await asyncio.sleep(POLL)


def _event(kind: str, at: dict[str, Position], data: str) -> str:
    return f"id: {','.join(map(str, at.values()))}\nevent: {kind}\ndata: {data}\n\n"


def _read_rounds(run: Path, position: Position) -> Any:
    with suppress(UserError):  # a link that leads out of the folder, which `facts` names
        return read_new_lines(file_in(run, "metrics.jsonl"), position)


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Add headers: the browser loads nothing from elsewhere and caches nothing."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        await app(scope, receive, add_headers)

    return answer


def _with_token(app: ASGIApp, token: str) -> ASGIApp:
    """Let requests with the token pass: in the address once, which sets a cookie, then in the cookie."""

    def fits(given: str) -> bool:
        return secrets.compare_digest(given.encode(), token.encode())

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        # Cookies do not tell ports apart: two servers on one machine need a name each.
        cookie = f"esper-{(scope.get('server') or ('', 0))[1]}"
        reply = app
        if fits(request.query_params.get("token", "")):
            reply = RedirectResponse("/", 303)  # so that the token is not in the history of the browser
            reply.set_cookie(cookie, token, httponly=True, samesite="strict")
        elif not fits(request.cookies.get(cookie, "")):
            reply = PlainTextResponse("open the whole address that 'esper watch' printed\n", 403)
        await reply(scope, receive, send)

    return answer


def open_socket(port: int | None, host: str = ADDRESS) -> socket.socket:
    """Open a socket on `host` at `port`; None takes the usual port, or any free one."""
    try:
        family, *_, place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise UserError(f"host is {host!r}; give an address of this machine, or 0.0.0.0 for all") from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: answers IPv4 too
    for number in [USUAL_PORT, 0] if port is None else [port]:
        try:
            return socket.create_server((place[0], number), family=family, dualstack_ipv6=both)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(f"{host} is no address of this machine; give one, or 0.0.0.0") from None
            if error.errno == errno.EACCES:
                raise UserError(f"port {number} is for the system alone; give one above 1023") from None
    raise UserError(f"port {port} is in use; give another with --port, or none for any that is free")


def serve(library: Library, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. ready: called once with the address of the page.

    For a listener at any other address than the usual one a token is required, which is part of that address.
    """
    host, port = listener.getsockname()[:2]
    # Without a token a request must name one of _HOSTS, which no other loopback address (::1, 127.0.0.2) is.
    token = None if host == ADDRESS else secrets.token_urlsafe(24)

    app = make_app(library, lambda: server.should_exit, token)
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    # 0.0.0.0 is every address of this machine; its name is one that others may know.
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    name = f"[{name}]" if ":" in name else name
    ready(f"http://{name}:{port}/{f'?token={token}' if token else ''}")
    with suppress(KeyboardInterrupt), interruptible():  # uvicorn repeats a signal once it has stopped
        server.run(sockets=[listener])
