"""The pages of the reference that are generated: every setting, from its model, and every command."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from typer.models import ArgumentInfo, CommandInfo

SETTINGS = """# Settings

Generated from the models, which check what they are given. `esper config` prints the settings of a run as
YAML, each with its meaning; `--preset`, `--config FILE` and `--set a.b=c` change them.

"""
COMMANDS = """# Commands

`esper COMMAND --help` prints the same. Bad input ends a command with one sentence and exit code 2,
Ctrl-C with 130.

"""


def settings_page() -> str:
    """Return the page of all settings of `GrowSettings`, `PopulationConfig` and `RunConfig`."""
    from esper.config import RunConfig
    from esper.growing.settings import GrowSettings
    from esper.population.config import PopulationConfig

    parts = (
        ("GrowSettings: `esper.grow(..., lr=1e-3)`", GrowSettings),
        ("PopulationConfig: how networks train, in `esper.grow` and in runs", PopulationConfig),
        ("RunConfig: `esper train`, `grow` and `compare`", RunConfig),
    )
    sections = []
    for title, model in parts:
        rows = "\n".join(setting_rows(model, model.__name__))
        head = f"## {title}\n\n{(model.__doc__ or '').strip()}\n\n"
        sections.append(f"{head}| setting | type | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return SETTINGS + "\n".join(sections)


def setting_rows(model: type[BaseModel], owner: str, path: str = "", given: Any = None) -> Iterator[str]:
    """Yield a row of the table for each setting, those of nested models under their dotted names.

    given: an instance whose values are the defaults, as the model that holds it may give others.
    """
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True) if given is None else getattr(given, name)
        if isinstance(default, BaseModel):
            yield from setting_rows(type(default), owner, f"{path}{name}.", default)
            continue
        limits = " ".join(str(limit) for limit in field.metadata)
        yield row(f"{path}{name}", owner, field.annotation, default, field.description or "", limits)


def row(name: str, owner: str, kind: Any, default: Any, meaning: str, limits: str) -> str:
    """Return one row, with an anchor such as `RunConfig.ppo.clip`."""
    cells = [f'<span id="{owner}.{name}"></span>`{name}`', f"`{type_name(kind)}`", f"`{shown(default)}`"]
    bounds = re.findall(r"(ge|gt|le|lt)=([^,)]+)", limits)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    allowed = " (" + ", ".join(f"{signs[sign]} {value}" for sign, value in bounds) + ")" if bounds else ""
    return "| " + " | ".join([*(cell.replace("|", "\\|") for cell in cells), meaning + allowed]) + " |"


def type_name(kind: Any) -> str:
    """Return an annotation as one would write it."""
    if get_origin(kind) is Literal:
        return " | ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(type_name(part) for part in get_args(kind))
    if get_origin(kind) is not None and hasattr(kind, "__metadata__"):
        return type_name(get_args(kind)[0])
    if get_origin(kind) is not None:
        inner = ", ".join("..." if part is Ellipsis else type_name(part) for part in get_args(kind))
        name = getattr(get_origin(kind), "__name__", str(get_origin(kind)))
        return f"{name}[{inner}]" if "Callable" not in name else "Callable"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def shown(value: Any) -> str:
    """Return a default as YAML and Python write it."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(each) for each in value) + "]"
    return str(getattr(value, "name", value))


def commands_page() -> str:
    """Return the page of all commands, with their arguments and options."""
    from esper import cli

    return COMMANDS + "\n".join(command_section(command) for command in cli.app.registered_commands)


def command_section(command: CommandInfo) -> str:
    """Return the section of one command, from the function that it calls."""
    rows, arguments = [], []
    for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items():
        kind, info = get_args(parameter.annotation)
        # In an Annotated, typer keeps the first name of an option where its default would be.
        first = info.default if isinstance(info.default, str) else f"--{name}"
        written = ", ".join(f"`{option}`" for option in (first, *(info.param_decls or ())))
        if isinstance(info, ArgumentInfo):
            arguments.append(name.upper())
            written = f"`{name.upper()}`"
        elif kind is not bool:
            written += f" {type_name(kind).removesuffix(' | None')}"
        default = "" if parameter.default in (None, False, parameter.empty) else f"`{parameter.default}`"
        rows.append(f"| {written} | {default} | {info.help or ''} |")
    lines = [
        f"## esper {command.name}\n",
        f"{command.help}\n",
        "    " + " ".join(["esper", str(command.name), *arguments]),
    ]
    lines += ["\n| | default | meaning |\n|---|---|---|", *rows] if rows else []
    return "\n".join([*lines, f"\nExample: `{str(command.epilog).removeprefix('Example: ')}`\n"])
