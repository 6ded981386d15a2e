"""`esper watch` and `esper report`: runs on a page, served live or written as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.commands import common
from esper.utils.errors import require


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="run folders, or folders that hold some; by default runs/", show_default=False),
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="8642 or a free one")] = None,
    host: Annotated[
        str, typer.Option("--host", help="an address of this machine for other machines to reach, or 0.0.0.0")
    ] = "127.0.0.1",
) -> None:
    """Show runs on a live page in the browser.

    The page follows the folders while they are written and changes nothing in them. It loads nothing from
    elsewhere. By default it answers this machine alone; with --host it answers those who open the address
    that is printed, which has a token. It is plain HTTP: use it in a network that you trust, or over ssh.
    """
    for package in ("starlette", "uvicorn"):
        require(package, "watch", "the page")
    from esper.watch.server import MADE_BY, Library, open_socket, serve

    folders = runs or [Path("runs")]
    library = Library(folders)

    def ready(address: str) -> None:
        found, places = len(library.runs()), " and ".join(map(str, folders))
        waiting = f"there is no run in {places} yet ({MADE_BY}), and the page shows one when it appears"
        said = f"watching {common.plural(found, 'run')}" if found else waiting
        typer.echo(f"{said}; open {address} (Ctrl-C ends)")

    serve(library, open_socket(port, host), ready)


def report(run: Annotated[Path, typer.Argument(help="the folder of the run")]) -> None:
    """Write report.html of a run, finished or not, into its folder."""
    from esper.runs.run_folder import RunFolder
    from esper.watch.report import write_report

    typer.echo(f"wrote {write_report(RunFolder.read(run))}")
