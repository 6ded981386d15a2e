"""Taking a plain model elsewhere: an archive of torch.export, ONNX, or tensors with a description."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.runs.files import write_atomically
from esper.runs.schema import SavedNetwork, to_json
from esper.utils.errors import UserError

BATCH = "batch"


def _dynamic_batch(inputs: int) -> tuple[dict[int, torch.export.Dim], ...]:
    return ({0: torch.export.Dim(BATCH, min=1)},) * inputs


def save_archive(model: nn.Module, sample: Tensor | Sequence[Tensor], path: Path | str) -> Path:
    """Write a model as a torch.export archive for any batch size; torch alone loads it.

    sample: [B, *input_shape], B at least 2, or one such for each input. Read it back with
    `torch.export.load(path).module()`.
    """
    inputs = _inputs_of(sample)
    program = torch.export.export(model.eval(), inputs, dynamic_shapes=_dynamic_batch(len(inputs)))
    torch.export.save(program, str(path))
    return Path(path)


def save_onnx(model: nn.Module, sample: Tensor | Sequence[Tensor], path: Path | str) -> Path:
    """Write a model as ONNX for any batch size. Needs the packages onnx and onnxscript.

    sample: [B, *input_shape], B at least 2, or one such for each input.
    """
    inputs = _inputs_of(sample)
    shapes = _dynamic_batch(len(inputs))
    try:
        torch.onnx.export(model.eval(), inputs, str(path), dynamo=True, dynamic_shapes=shapes, verbose=False)
    except ImportError as error:
        raise UserError(
            f"writing ONNX needs a package that is not installed ({error}); run: pip install "
            "'esper-lite[onnx]'"
        ) from error
    return Path(path)


def save_network(folder: Path, model: nn.Module, network: SavedNetwork, described: str) -> None:
    """Write the tensors of a model, what is known of it, and the same for people as Markdown."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "network.safetensors", save_tensors(tensors, {"format": "pt"}))
    write_atomically(folder / "network.md", described.encode())
    write_atomically(folder / "network.json", to_json(network).encode() + b"\n")


def _inputs_of(sample: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A sample for each input; raises a UserError where one is no batch of two or more."""
    inputs = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    for given in inputs:
        if given.ndim < 1 or given.shape[0] < 2:
            raise UserError(
                f"sample has shape {list(given.shape)}; give a batch of at least 2 inputs, so that the batch "
                "size stays free"
            )
    return inputs
