"""`esper train` and `esper resume`: train a controller, and go on with any run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.commands import common
from esper.utils.errors import UserError
from esper.utils.launch import Launch

if TYPE_CHECKING:
    from esper.runs.run_folder import RunFolder


def train(
    config: common.ConfigFile = None,
    preset: common.Preset = None,
    overrides: common.Overrides = None,
    task: common.TaskName = None,
    out: common.Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="go on with the run in --out if there is one, for schedulers that repeat a command; of its "
            "settings rounds, device and telemetry may differ",
        ),
    ] = False,
    device: common.Device = None,
    quiet: common.Quiet = False,
) -> None:
    """Train a controller that decides what grows, and when.

    A member is one small network that trains and grows. A round is one training of all members, from first
    weights to last, after which the controller learns from what came of it. Ctrl-C ends the run after the
    round in flight, a second one at once; either way, and after a crash too, 'esper resume' goes on where
    it stopped.

    On several GPUs or machines: torchrun --nproc-per-node=4 -m esper train ... (docs/scaling.md).
    """
    settings = common.resolve_settings(config, preset, overrides, task, device)
    launch = Launch.of()
    if (launch.may_restart or resume) and out is None:
        raise UserError(
            "a run that may be started again has to be found again; give --out FOLDER, or leave out --resume "
            "and torchrun --max-restarts"
        )
    if out is not None and not resume and launch.size == 1:
        from esper.runs.run_folder import check_free

        check_free(out)  # before seconds are spent on imports
    if not quiet and not launch.rank:
        typer.echo(f"loading PyTorch and {settings.task} ...")  # takes seconds
    from esper.training import TrainingRun
    from esper.utils.gather import broadcast, processes

    with processes(launch) as gather:
        # torchrun repeats the same command line after a failure: it then goes on with the run in `out`.
        folder, again = out or common.new_folder("train", settings.task), resume or launch.restarts > 0
        if broadcast(gather, again and (folder / "config.yaml").is_file()):
            run = TrainingRun.resume(
                folder,
                device,
                change=lambda begun: common.resolve_settings(config, preset, overrides, task, base=begun),
                gather=gather,
            )
        else:
            run = TrainingRun.start(settings, folder, gather=gather)
        code = common.run_training(run, quiet)
    raise typer.Exit(code)


def resume(
    run: Annotated[Path, typer.Argument(help="the folder of the run")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="an older checkpoint of the run; by default its last")
    ] = None,
    overrides: common.Overrides = None,
    device: common.Device = None,
    quiet: common.Quiet = False,
) -> None:
    """Resume a run that was stopped, or extend it.

    --set rounds=N extends a training run.

    A training run continues from its last checkpoint, to the same bits as if it had never been stopped; what
    came after that checkpoint is done again. A comparison or a growth keeps nothing until it is done, and is
    started again with the same arguments.
    """
    from esper.runs.run_folder import RunFolder
    from esper.utils.gather import all_or_none, broadcast, processes

    with processes(Launch.of()) as gather:
        folder = all_or_none(gather, lambda: None if gather.rank else RunFolder.read(run))
        kind = broadcast(gather, folder.kind if folder else None)
        if gather.size > 1 and kind != "train":
            raise UserError(f"{run} holds a run of 'esper {kind}', for one process; use 'esper resume {run}'")
        if folder is not None and folder.from_python:
            raise UserError(
                f"{run} holds a growth of a model and data of your own program; call esper.grow there again, "
                f"with the same arguments and out={str(run)!r}, resume=True"
            )
        if folder is not None and kind == "demo":
            raise UserError(f"{run} holds a demo; go on with: python -m studies.demo --out {run}")
        if folder is not None and kind != "train":  # it keeps nothing until it is done
            for name, value in {"--checkpoint": checkpoint, "--set": overrides, "--device": device}.items():
                if value:
                    raise UserError(
                        f"{name} is for runs that train, and {run} holds one of 'esper {kind}'; leave it "
                        f"out, or begin anew in another folder with: {folder.command_text()}"
                    )
            _run_again(folder, quiet)
            return
        from esper.config import load_config
        from esper.training import TrainingRun

        continued = TrainingRun.resume(
            run, device, checkpoint, lambda begun: load_config(overrides=overrides or [], base=begun), gather
        )
        done, rounds = continued.trainer.rounds_done, continued.trainer.rounds
        if folder is not None:
            continued.folder.add_command()
        if folder is not None and not quiet:
            left = "nothing is left to do" if continued.finished else f"{rounds - done} to go"
            typer.echo(f"{run}: {done} of {common.plural(rounds, 'round')} are done, {left}")
        code = common.run_training(continued, quiet)
    raise typer.Exit(code)


def _run_again(folder: RunFolder, quiet: bool) -> None:
    """Start a comparison or a growth again unless it has its results; write a report that is missing."""
    from esper.commands import compare, grow
    from esper.runs.run_folder import RunFolder
    from esper.training import read_config
    from esper.watch.report import write_report

    if folder.results() is None:
        run, name = (compare.run, "controllers") if folder.kind == "compare" else (grow.run, "controller")
        settings, asked = read_config(folder), folder.request.get(name)
        if not isinstance(asked, str):
            raise UserError(f"versions.json of {folder.path} is damaged: its request names no {name}")
        run(settings, asked, bool(folder.request.get("force")), lambda: RunFolder.open(folder.path), quiet)
        return
    if not folder.report_path.exists():
        with RunFolder.open(folder.path) as opened:
            typer.echo(f"wrote {write_report(opened)}")
    typer.echo(f"{folder.path}: the run is finished; look at it with 'esper report {folder.path}'")
