"""Taking a plain model elsewhere: an archive of torch.export, or ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.foundation.errors import UserError

BATCH = "batch"


def _dynamic_batch(inputs: int = 1) -> tuple[dict[int, torch.export.Dim], ...]:
    return ({0: torch.export.Dim(BATCH, min=1)},) * inputs


def save_archive(model: nn.Module, sample: Tensor | Sequence[Tensor], path: Path | str) -> Path:
    """Write a model as a torch.export archive for any batch size; torch alone loads it.

    sample: [B, *input_shape], B at least 2, or one such for each input. Read it back with
    `torch.export.load(path).module()`.
    """
    inputs = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    for given in inputs:
        _check_sample(given)
    program = torch.export.export(model.eval(), inputs, dynamic_shapes=_dynamic_batch(len(inputs)))
    torch.export.save(program, str(path))
    return Path(path)


def save_onnx(model: nn.Module, sample: Tensor, path: Path | str) -> Path:
    """Write a model as ONNX for any batch size. Needs the packages onnx and onnxscript."""
    _check_sample(sample)
    try:
        torch.onnx.export(
            model.eval(), (sample,), str(path), dynamo=True, dynamic_shapes=_dynamic_batch(), verbose=False
        )
    except ImportError as error:
        raise UserError(
            f"writing ONNX needs a package that is not installed ({error}); run: pip install "
            "'esper-lite[onnx]'"
        ) from error
    return Path(path)


def _check_sample(sample: Tensor) -> None:
    if sample.ndim < 1 or sample.shape[0] < 2:
        raise UserError(
            f"sample has shape {list(sample.shape)}; give a batch of at least 2 inputs, so that the batch "
            "size "
            "stays free"
        )
