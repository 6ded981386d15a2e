"""Changes to models and other objects that are taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class Undo:
    """What some objects were: their attributes, and what the dictionaries among these held.

    Whether a module learns is no part of it.
    """

    def __init__(self, objects: Iterable[Any]):
        unique = {id(thing): thing for thing in objects}
        self._saved = [(thing, _copied(vars(thing))) for thing in unique.values()]

    def __call__(self) -> None:
        """Make them what they were."""
        for thing, attributes in self._saved:
            own = vars(thing)
            mode = {key: own[key] for key in ("training",) if key in own}
            own.clear()
            own.update(_copied(attributes) | mode)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) if isinstance(value, dict) else value for key, value in attributes.items()}


@contextmanager
def undone(objects: Iterable[Any]) -> Iterator[None]:
    """What happens to these objects inside is taken back at the end."""
    undo = Undo(objects)
    try:
        yield
    finally:
        undo()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode for a while; afterwards each has its own mode again.

    `model.train()` would not do: it also wakes the submodules that were frozen in eval mode.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without gradients and in eval mode; modes go back to what they were."""
    with in_eval_mode(model), torch.no_grad():
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch off TF32 and autocast for a while, so that two forward passes can be compared.

    With TF32, two equivalent passes of a GPT of width 256 differ by 5e-4. All settings are restored.
    """
    backends: Any = torch.backends
    products = (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")
    convolutions = (lambda: backends.cudnn.allow_tf32, partial(setattr, backends.cudnn, "allow_tf32"), False)
    kernels = [getattr(backends.cudnn, name, None) for name in ("conv", "rnn")]
    with ExitStack() as stack:
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_exact(*products, [backends.cuda.matmul, backends.mkldnn.matmul]))
        stack.enter_context(_exact(*convolutions, kernels))
        yield


@contextmanager
def _exact(
    get: Callable[[], Any], put: Callable[[Any], Any], exact: Any, backends: Sequence[Any]
) -> Iterator[None]:
    """Set a switch of torch's to `exact`, and what newer versions keep of it in each backend to "ieee".

    Torch raises where a switch is read that was set through `fp32_precision`; then only that is set.
    """
    newer = [backend for backend in backends if hasattr(backend, "fp32_precision")]  # torch 2.9 and later
    before = [backend.fp32_precision for backend in newer]
    try:
        switch = get()
    except RuntimeError:
        switch = None
    else:
        put(exact)
    for backend in newer:
        if switch is None or backend.fp32_precision not in ("ieee", "none"):
            backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        if switch is not None:
            put(switch)
        for backend, value in zip(newer, before, strict=True):
            backend.fp32_precision = value
