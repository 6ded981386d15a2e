"""The command line: `esper <command>`. Each command lives in `esper.commands`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from esper import __version__
from esper.commands import (
    compare,
    config,
    demo,
    grow,
    lifecycle,
    machine,
    report,
    resume,
    tables,
    train,
    watch,
)

_NO_MEMORY = ("MemoryError", "OutOfMemoryError")  # by name: the second is torch's, which need not be loaded

app = typer.Typer(
    name="esper",
    help="Neural networks that grow while they train, raised by a learned controller.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("grow")(grow.grow)
app.command("compare")(compare.compare)
app.command("resume")(resume.resume)
app.command("demo")(demo.demo)
app.command("lifecycle")(lifecycle.lifecycle)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.command("schema")(tables.schema)
app.command("blueprints")(tables.blueprints)
app.command("tasks")(tables.tasks)
app.command("doctor")(machine.doctor)
app.add_typer(config.app, name="config")


@app.callback(invoke_without_command=True)
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="show the traceback of an error (or set ESPER_DEBUG)")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="print the version and leave")] = False,
) -> None:
    if version:
        print(f"esper {__version__}")
        raise typer.Exit
    if debug:
        os.environ["ESPER_DEBUG"] = "1"


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0 well, 2 for bad input, which is told in one sentence.

    Anything else that goes wrong is a bug and shows its traceback.
    """
    try:
        code = get_command(app).main(args=list(arguments), prog_name="esper", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("ESPER_DEBUG"):
            raise
        return _complain(" ".join(str(error).split()))
    except Exception as error:
        if type(error).__name__ in _NO_MEMORY or "can't allocate memory" in str(error):
            return _complain("there is not enough memory: lower members, or population.rows_per_chunk")
        usage = getattr(error, "format_message", None)  # an option or argument that typer refused
        if usage is None:
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "esper"
        return _complain(f"{usage().rstrip('.')}; see '{command} --help'")


def _complain(sentence: str) -> int:
    print(f"esper: {sentence}", file=sys.stderr)
    return 2


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without these letters shows a question mark
    sys.exit(run(sys.argv[1:]))
