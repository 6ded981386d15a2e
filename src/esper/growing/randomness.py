"""Every generator that a growth draws from: torch's, NumPy's, Python's, and those of the loaders."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GENERATOR = "MT19937"  # NumPy's global one, whose state has a fixed form
_SMALL = 2**32  # NumPy takes no larger seed


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """What is drawn inside belongs to the seed, and the caller's generators are left as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (augmentation may use it)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % _SMALL)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


class Randomness:
    """The states of all generators as plain tensors, and the way back.

    loaders: those whose own generators, and those of their samplers, count as well.
    """

    def __init__(self, device: torch.device, loaders: Iterable[Any] = ()):
        self._device = device
        self._own = _generators(loaders)

    def state_dict(self) -> dict[str, Tensor]:
        """Where every generator stands now."""
        _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
        _, words, spare = random.getstate()
        states = {
            "torch": torch.get_rng_state(),
            "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "numpy.rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
            "python.words": torch.tensor(words),
            "python.spare": torch.tensor(math.nan if spare is None else spare, dtype=torch.float64),
        }
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states | {f"loader.{i}": own.get_state() for i, own in enumerate(self._own)}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Go on drawing where `state_dict` stood. A generator that was not there then goes on by itself."""
        torch.set_rng_state(states["torch"])
        position, has_gauss, gauss = states["numpy.rest"].tolist()
        keys = states["numpy.keys"].numpy().astype(np.uint32)
        np.random.set_state((_GENERATOR, keys, int(position), int(has_gauss), gauss))  # noqa: NPY002
        spare = float(states["python.spare"])
        words = tuple(states["python.words"].tolist())
        random.setstate((3, words, None if math.isnan(spare) else spare))
        if "cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)
        for i, own in enumerate(self._own):
            if f"loader.{i}" in states:
                own.set_state(states[f"loader.{i}"])


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Those of loaders and of their samplers, each once."""
    found: list[torch.Generator] = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        holders = (loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
        for own in (getattr(holder, "generator", None) for holder in holders):
            if isinstance(own, torch.Generator) and all(own is not other for other in found):
                found.append(own)
    return found
