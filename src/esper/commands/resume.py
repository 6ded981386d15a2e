"""`esper resume`: a run that was stopped goes on, to the same bits as if it never had been."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands.demo import USUAL_MEMBERS, complete
from esper.commands.options import Device, JsonLines, Overrides, Quiet, plural, print_line
from esper.commands.running import carry_through
from esper.utils.errors import UserError
from esper.utils.launch import Launch

if TYPE_CHECKING:
    from esper.runs.run_folder import RunFolder
    from esper.training import TrainingRun
    from esper.utils.gather import Gather

SHARED = ("train", "compare")  # kinds that several processes can go on with
FROM_THE_START = ("compare", "grow")  # kinds that keep nothing until they are done


def resume(
    run: Annotated[Path, typer.Argument(help="the folder of the run")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="an older checkpoint of the run; by default its last")
    ] = None,
    overrides: Overrides = None,
    device: Device = None,
    quiet: Quiet = False,
    json_lines: JsonLines = False,
) -> None:
    """Go on with a run that was stopped, or extend one with --set rounds=N.

    A training run continues from its last checkpoint, to the same bits as if it had never been stopped; what
    came after that checkpoint is done again. A demo is then completed. A comparison or a growth keeps nothing
    until it is done, and begins again as it was asked for.
    """
    from esper.runs.run_folder import RunFolder
    from esper.utils.gather import all_or_none, from_first, processes

    with processes(Launch.of()) as gather:
        folder = all_or_none(gather, lambda: None if gather.rank else RunFolder.read(run))
        kind = from_first(gather, folder.kind if folder else None)
        if gather.size > 1 and kind not in SHARED:
            raise UserError(
                f"{run} holds a run of 'esper {kind}', which one process does; use 'esper resume {run}'"
            )
        if folder is not None and folder.from_python:
            raise UserError(
                f"{run} holds a growth of a model and data that are in your own program; call esper.grow "
                f"there again, with the same arguments and out={str(run)!r}, resume=True"
            )
        if kind in FROM_THE_START:
            options: dict[str, object] = {"--checkpoint": checkpoint, "--set": overrides, "--device": device}
            all_or_none(gather, lambda: _refuse_options(folder, options) if folder else None)
            if not from_first(gather, folder is not None and _is_finished(folder, json_lines)):
                _again(kind, folder, gather, quiet, json_lines)
            return
        from esper.config import load_config
        from esper.training import TrainingRun

        seen = max((line["round"] for line in folder.metrics_file), default=0) if folder else 0
        continued = TrainingRun.resume(
            run, device, checkpoint, lambda begun: load_config(overrides=overrides or [], base=begun), gather
        )
        code = _go_on(continued, seen, quiet, json_lines) if folder else carry_through(continued)
    raise typer.Exit(code)


def _go_on(continued: TrainingRun, seen: int, quiet: bool, json_lines: bool) -> int:
    """Play what is left of a training run, and complete a demo; the exit code.

    seen: the rounds that its folder told of before.
    """
    folder = continued.folder
    folder.add_command()
    done, rounds = continued.trainer.rounds_done, continued.trainer.rounds
    if seen > done:
        print_line(
            f"note: what came after round {done}, up to round {seen}, is done again", for_machines=True
        )
    unfinished_demo = folder.kind == "demo" and not (continued.finished and folder.results() is not None)
    if not (quiet or json_lines):
        left = "nothing is left to do" if continued.finished else f"{rounds - done} to go"
        print_line(f"{folder.path}: {done} of {plural(rounds, 'round')} are done, {left}")
    code = carry_through(continued, quiet, json_lines, report=not unfinished_demo)
    if unfinished_demo and code == 0:
        complete(continued, int(folder.request.get("members", USUAL_MEMBERS)))
    return code


def _is_finished(folder: RunFolder, as_json: bool) -> bool:
    """Whether a comparison or a growth has its results, which is then said; a missing report is written."""
    if folder.results() is None:
        return False
    if not folder.report_path.exists():
        from esper.runs.report import write_report
        from esper.runs.run_folder import RunFolder

        with RunFolder.open(folder.path) as opened:
            print_line(f"wrote {write_report(opened)}", as_json)
    print_line(f"{folder.path}: the run is finished; look at it with 'esper report {folder.path}'", as_json)
    return True


def _again(kind: str, folder: RunFolder | None, gather: Gather, quiet: bool, as_json: bool) -> None:
    """Do a comparison or a growth again in its own folder, which the first process has."""
    from esper.commands import compare, grow

    if kind == "compare":
        compare.compare_again(folder, gather, quiet, as_json)
    elif folder is not None:
        grow.grow_again(folder, quiet, as_json)


def _refuse_options(folder: RunFolder, given: dict[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise UserError(
                f"{name} is for runs that train, and {folder.path} holds one of 'esper {folder.kind}'; leave "
                f"it out, or begin anew in another folder with: {folder.command_text()}"
            )
