"""Taking a plain model elsewhere: an archive of torch.export, or ONNX."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from esper.foundation.errors import UserError

BATCH = "batch"


def _dynamic_batch() -> tuple[dict[int, torch.export.Dim]]:
    return ({0: torch.export.Dim(BATCH, min=1)},)


def save_archive(model: nn.Module, sample: Tensor, path: Path | str) -> Path:
    """Write a model as a torch.export archive for any batch size; torch alone loads it.

    sample [B, *input_shape], B at least 2. Read it back with `torch.export.load(path).module()`.
    """
    _check_sample(sample)
    program = torch.export.export(model.eval(), (sample,), dynamic_shapes=_dynamic_batch())
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
