"""`esper export`: the network of a run as one file for use elsewhere, with a model card beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.utils.errors import UserError, one_line, require

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from esper.runs.run_folder import RunFolder

LOADING = {
    "pt2": 'import torch\n\nmodel = torch.export.load("network.pt2").module()\noutputs = model(inputs)',
    "onnx": 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("network.onnx")\n'
    "names = [each.name for each in session.get_inputs()]\n"
    "outputs = session.run(None, dict(zip(names, [inputs])))",
}


def export(
    run: Annotated[Path, typer.Argument(help="the folder of 'esper grow' or of esper.grow(..., out=)")],
    onnx: Annotated[bool, typer.Option("--onnx", help="network.onnx, for ONNX Runtime and others")] = False,
    pt2: Annotated[bool, typer.Option("--pt2", help="network.pt2, which torch alone loads")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder; by default RUN/export")] = None,
) -> None:
    """Export the network of a run, with a model card.

    The batch size stays free. An ONNX file is run once beside the original, and refused where they differ.
    """
    from esper.runs.files import disk_errors, write_atomically
    from esper.runs.run_folder import RunFolder

    folder, target, archive = RunFolder.read(run), out or run / "export", run / "network.pt2"
    if folder.network() is None:
        raise UserError(f"{run} holds no grown network; give a folder of 'esper grow' or esper.grow(out=)")
    if not archive.exists():
        raise UserError(f"{run} has no network.pt2, because torch.export failed; network.md there says why")
    if not onnx and not pt2:
        raise UserError("no format is given; add --onnx or --pt2, or both")
    typer.echo("loading PyTorch and the network ...")  # takes seconds
    import torch

    try:
        program = torch.export.load(archive)
    except Exception as error:  # of many kinds
        raise UserError(f"{archive} is damaged, or of another torch: {one_line(error)}") from error
    with disk_errors("write", target):
        target.mkdir(parents=True, exist_ok=True)
    if onnx:
        write_onnx(program, target / "network.onnx")
    if pt2 and target.resolve() != run.resolve():
        write_atomically(target / "network.pt2", archive.read_bytes())
    formats = [name for name, wanted in (("onnx", onnx), ("pt2", pt2)) if wanted]
    write_atomically(target / "README.md", model_card(folder, program, formats).encode())
    typer.echo(f"wrote {', '.join(f'network.{name}' for name in formats)} and README.md to {target}")


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write a program as ONNX; raise a UserError where it cannot be converted or computes otherwise."""
    import torch

    from esper.runs.files import disk_errors

    # The converter imports them late, and would fail in the middle with an error of its own.
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx", "an export to ONNX")
    # Its only warnings name operators of torchvision, which is not needed.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    inputs, named = program.example_inputs
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None
        found = converted(*inputs, **named)
    except Exception as error:  # whatever the converter raises for a user's model
        raise UserError(f"the network could not be converted to ONNX: {one_line(error)}") from error
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(program.module()(*inputs, **named))
    try:
        torch.testing.assert_close(list(found), wanted, rtol=1e-3, atol=1e-4)
    except AssertionError as error:
        raise UserError(f"the ONNX network computes otherwise than the original: {one_line(error)}") from None
    with disk_errors("write", path):
        converted.save(str(path))


def model_card(folder: RunFolder, program: ExportedProgram, formats: list[str]) -> str:
    """Return the card of a network as Markdown: what it is, what grew, its scores, how to load it."""
    network, growth = folder.network(), folder.growth()
    assert network is not None
    score = growth.score_name if growth else "accuracy"
    origin = f"A {network.host} of {network.host_parameters:,} parameters"
    trained, unit = ("", "epochs") if growth else (f" trained on {network.task}", "steps")
    scaled = "" if growth else "Inputs are as the data set has them: the network standardizes them itself."
    rows = {
        "parameters": f"{network.parameters:,}",
        f"validation {score}": f"{network.validation_accuracy:.4f}",
        f"test {score}": f"{network.test_accuracy:.4f}",
        f"test {score} without growth, at equal training FLOPs": f"{network.ungrown_test_accuracy:.4f}",
    }
    best = f"The best of {network.members} networks on validation data. " if network.members > 1 else ""
    nodes = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    signature = program.graph_signature
    specs = [
        f"| {kind} `{name}` | {str(nodes[name].dtype).removeprefix('torch.')} | "
        f"[{', '.join(['batch', *(str(size) for size in nodes[name].shape[1:])])}] |"
        for kind, names in (("input", signature.user_inputs), ("output", signature.user_outputs))
        for name in names
        if isinstance(name, str) and name in nodes
    ]
    versions = folder.about.get("versions", {})
    verdicts = [line for line in (growth.verdicts if growth else ()) if line not in network.changes]
    made = [f"{name} {versions[name]}" for name in ("esper-lite", "torch", "python") if name in versions]
    return "\n".join(
        [
            "---\ntags: [esper, growing-network]\n---",
            f"# {network.host.partition('(')[0]}\n",
            f"{origin}{trained}: {network.steps} {unit} under the controller {network.controller}. "
            f"{best}Scores are of one network.\n",
            "| | |\n|---|---|",
            *(f"| {name} | {value} |" for name, value in rows.items() if value != "nan"),
            "\n## What grew\n",
            *(
                [f"- {line}" for line in network.changes]
                or ["Nothing was added: the model has the parts that it was given with."]
            ),
            *(["", *(f"- {line}" for line in verdicts)] if verdicts else []),
            "\n## Use\n",
            "| tensor | dtype | shape |\n|---|---|---|",
            *specs,
            *(["", scaled] if scaled else []),
            *(f"\n```python\n{LOADING[name]}\n```" for name in formats),
            f"\nMade with {', '.join(made)} and seed {folder.about['seed']}.\n",
        ]
    )
