"""A user's data in memory: a pair (inputs, targets) of tensors or NumPy arrays, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.utils.errors import UserError

ALLOWED = "a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays"
VALIDATION_SHARE = 0.2  # of the training data, where no validation data are given
LEAST_SAMPLES = 2


def is_pair(data: Any) -> bool:
    """Tell whether data are two arrays or tensors."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "shape") for part in data)


def read_pair(name: str, data: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on the CPU, classes as int64 and decimals as `dtype`.

    Raises a UserError in one sentence for what is wrong with them.
    """
    inputs, targets = (_tensor(name, part) for part in data)
    targets = targets if targets.is_floating_point() else targets.long()
    inputs, targets = (x.to(dtype) if x.is_floating_point() else x for x in (inputs, targets))
    if len(inputs) != len(targets):
        raise UserError(
            f"{name} has {len(inputs)} inputs and {len(targets)} targets; give one target for each input"
        )
    least = LEAST_SAMPLES if name == "train" else 1
    if len(inputs) < least:
        raise UserError(f"{name} has {len(inputs)} samples; at least {least} are needed: give more data")
    for what, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.flatten(1).isfinite().all(1) if tensor.ndim > 1 else ~tensor.isfinite()).sum())
            raise UserError(
                f"{name} has {what} that are NaN or infinite in {bad} of {len(tensor)} samples; fill in "
                "or drop those samples"
            )
    return inputs, targets


def _tensor(name: str, data: Any) -> Tensor:
    """On the CPU, in the type that it has."""
    if isinstance(data, np.ndarray) and data.dtype.kind not in "fiub":
        raise UserError(f"{name} holds {data.dtype} values; give numbers: encode text and categories first")
    if not isinstance(data, Tensor | np.ndarray):
        raise UserError(f"{name} holds a {type(data).__name__}; give {ALLOWED}")
    tensor = torch.as_tensor(data).detach().to("cpu")
    if tensor.ndim == 0:
        raise UserError(f"{name} holds a single number; the first axis must be the samples")
    return tensor
