"""Opening the door: a socket of this machine alone, and the server behind it until Ctrl-C."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from esper.foundation.errors import UserError
from esper.foundation.interrupts import interruptible
from esper.watch.library import Library
from esper.watch.server import make_app

ADDRESS = "127.0.0.1"
USUAL_PORT = 8642


def open_socket(port: int | None) -> socket.socket:
    """A socket on loopback: at `port`, or at the usual one or any free one where None is given."""
    wanted = [USUAL_PORT, 0] if port is None else [port]
    for number in wanted:
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((ADDRESS, number))
            door.listen()
        except OSError:
            door.close()
            continue
        return door
    raise UserError(f"port {port} is in use; give another with --port, or none for any that is free")


def serve(library: Library, door: socket.socket, ready: Callable[[str], None]) -> None:
    """Answer until Ctrl-C. `ready` is told the address once, before the first answer."""
    server: uvicorn.Server

    def stopping() -> bool:
        return server.should_exit

    config = uvicorn.Config(
        make_app(library, stopping), log_level="error", lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    ready(f"http://{ADDRESS}:{door.getsockname()[1]}/")
    with suppress(KeyboardInterrupt), interruptible():  # uvicorn repeats a signal once it has stopped
        server.run(sockets=[door])
