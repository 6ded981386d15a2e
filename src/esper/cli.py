"""The command line: `esper <command>`. Each command is a module of `esper.commands`."""

from __future__ import annotations

import inspect
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.main import get_command

from esper import __version__
from esper.commands import compare, export, grow, tables, train, watch
from esper.utils.errors import LostProcessError, ReportedElsewhereError, UserError, with_place
from esper.utils.launch import Launch

_USER_ERRORS = (ValueError, OSError, ImportError)
_NO_MEMORY = ("MemoryError", "OutOfMemoryError")  # by name: the second is torch's, which need not be loaded
_COMMANDS: tuple[tuple[Callable[..., Any], str], ...] = (  # what runs, and an example of it
    (tables.estimate, "esper estimate model.py:make --tokens 2e9"),
    (watch.watch, "esper watch runs/demo"),
    (watch.report, "esper report runs/first"),
    (export.export, "esper export runs/grown --onnx"),
    (train.train, "esper train --task digits --out runs/first"),
    (grow.grow, "esper grow --preset compute --controller schedule --members 4"),
    (compare.compare, "esper compare --preset compute --controllers static,schedule,tamiyo"),
    (train.resume, "esper resume runs/first --set rounds=60"),
    (tables.tasks, "esper tasks"),
    (tables.controllers, "esper controllers"),
    (tables.config, "esper config --preset digits --set members=8"),
    (tables.doctor, "esper doctor"),
)

# Seconds in which another process reports an error: torchrun ends all of them when the first one ends.
REPORT_SECONDS = 20.0
_MULTI_PROCESS = ("train", "resume")  # commands that several processes can do together

app = typer.Typer(
    name="esper",
    help="Train neural networks that grow. A model of your own grows in Python: esper.grow(model, train); "
    "train, grow and compare study growth with small networks of Esper's own.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _function, _example in _COMMANDS:
    _paragraphs = (inspect.getdoc(_function) or "").split("\n\n")  # the terminal wraps them, not the source
    _help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)
    app.command(_function.__name__, help=_help, epilog=f"Example: {_example}")(_function)
_command = cache(get_command)  # building it takes longer than many commands


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Handle the options before a command; without a command, print the help."""
    if version:
        print(f"esper {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif Launch.of().size > 1 and context.invoked_subcommand not in _MULTI_PROCESS:
        raise UserError(
            f"torchrun started {Launch.of().size} processes, and 'esper {context.invoked_subcommand}' is for "
            f"one; torchrun is for {', '.join(_MULTI_PROCESS)}"
        )


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    0: all is well; 2: bad input, reported in one sentence; 130: ended with Ctrl-C. Anything else that goes
    wrong is a bug and shows its traceback. Of several processes one reports bad input; a process that fails
    prints in one line which it is and where, and returns 1.
    """
    try:
        code = _command(app).main(args=list(arguments), prog_name="esper", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except Exception as error:
        if os.environ.get("ESPER_DEBUG") and isinstance(error, _USER_ERRORS):
            raise
        sentence, launch = _error_message(error, arguments), Launch.of()
        if launch.size > 1:
            return _report_process(launch, error, sentence)
        if sentence is None:
            raise
        return _print_error(sentence)


def _error_message(error: Exception, arguments: Sequence[str]) -> str | None:
    """Return the sentence for the user about an error; None where it is a bug."""
    if isinstance(error, _USER_ERRORS):
        # a UserError says all that there is to say; any other may come from the user's own code
        return " ".join(str(error).split()) if isinstance(error, UserError) else with_place(error)
    if type(error).__name__ in _NO_MEMORY or "can't allocate memory" in str(error):
        return "there is not enough memory: lower members, host.width, or population.rows_per_chunk"
    # By attribute and not by class: typer brings its own copy of click, under a name that differs by version.
    usage = getattr(error, "format_message", None)  # an option or argument that typer refused
    if usage is None:
        return None
    command = getattr(getattr(error, "ctx", None), "command_path", "esper")
    said = _suggest_setting(error, arguments) or usage().rstrip(".")
    return f"{said}; see '{command} --help'"


def _suggest_setting(error: Exception, arguments: Sequence[str]) -> str | None:
    """Name the settings that an unknown option is called like, for a command that takes --set."""
    option, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    takes = context is not None and any("--set" in parameter.opts for parameter in context.command.params)
    if not takes or type(error).__name__ != "NoSuchOption":
        return None
    from esper.config import RunConfig
    from esper.utils.settings import keys_of

    name = option.lstrip("-").replace("-", "_")
    following = [*arguments, ""][arguments.index(option) + 1] if option in arguments else ""
    value = following if following and not following.startswith("-") else "VALUE"
    paths = [path for path in keys_of(RunConfig) if name in (path, path.rsplit(".")[-1])]
    given = " or ".join(f"--set {path}={value}" for path in paths)
    return f"there is no option {option}, but a setting: use {given}" if paths else None


def _report_process(launch: Launch, error: Exception, sentence: str | None) -> int:
    """Print the error of one of several processes in one line, and return the exit code.

    Bad input, which all were given, is printed once on each machine. Notes of an error say where it happened.
    """
    places = getattr(error, "__notes__", [])
    if sentence is not None and not places:
        if launch.local_rank == 0 and not isinstance(error, ReportedElsewhereError):
            return _print_error(sentence)
        # torchrun ends all processes with the first: this one waits until the other has printed.
        time.sleep(REPORT_SECONDS)
        return 2
    ours = isinstance(error, LostProcessError)
    said = sentence or (str(error) if ours else f"{type(error).__name__}: {error}")
    return _print_error(", ".join([str(launch), *places]) + f": {' '.join(said.split())}", 1)


def _print_error(sentence: str, code: int = 2) -> int:
    print(f"esper: {sentence}", file=sys.stderr)
    return code


def main() -> None:
    """Run the command line of this process, and end it with the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without these letters shows a question mark
    sys.exit(run(sys.argv[1:]))
