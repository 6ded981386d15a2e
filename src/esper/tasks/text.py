"""Predict the next character of the Python standard library's sources: text that every machine has.

The sources, and so the data, differ a little between versions of Python; the vocabulary and the sizes do not.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.tasks.task import HostSpec, Split, Splits, TaskEntry, register

# Modules that are single files, and large enough together, in every supported version of Python.
MODULES = (
    "argparse", "bdb", "calendar", "configparser", "contextlib", "csv", "dataclasses", "difflib", "doctest",
    "fractions", "functools", "heapq", "inspect", "locale", "shutil", "statistics", "textwrap", "threading",
)  # fmt: skip
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))  # printable ASCII and the end of a line
OTHER = len(CHARACTERS)  # whatever is none of them
CONTEXT = 32
WINDOWS_PER_BLOCK = 64  # neighbouring windows stay in one split

TEXT = TaskEntry(
    name="text",
    topology="transformer",
    input_shape=(CONTEXT,),
    num_classes=len(CHARACTERS) + 1,
    sizes=(8192, 1024, 1024),
    host=HostSpec("gpt", {"width": 32, "heads": 4, "expansion": 2}),
    description="The next character of the Python standard library's sources",
    scaling="none",
)


@register(TEXT)
def text(seed: int) -> Splits:
    tokens = encode(_sources())
    blocks = [size // WINDOWS_PER_BLOCK for size in TEXT.sizes]
    needed = sum(TEXT.sizes) * CONTEXT + 1
    inputs, targets = (
        tokens[start : start + needed - 1].reshape(-1, WINDOWS_PER_BLOCK, CONTEXT) for start in (0, 1)
    )
    # Blocks, not windows, are dealt to the splits: neighbouring windows share words.
    order = torch.from_numpy(np.random.default_rng(seed).permutation(sum(blocks)))
    parts = order.split(blocks)
    return Splits(*(Split(inputs[part].flatten(0, 1), targets[part].flatten(0, 1)) for part in parts))


def encode(characters: str) -> Tensor:
    """Encode characters as indices into the vocabulary.  # [len] int64"""
    table = np.full(128, OTHER, dtype=np.int64)
    table[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
    return torch.from_numpy(np.where(codes < 128, table[np.minimum(codes, 127)], OTHER))


@cache
def _sources() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
