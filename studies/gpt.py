"""Text for the GPTs of studies and benchmarks: bytes of the sources of Python, torch and other packages."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from esper.tasks.task import HostSpec, Split, Task, TestSplit

SUFFIXES = (".py", ".pyi", ".h")
TEXTS = (".md", ".txt", ".rst")  # of a folder that is given
EXCLUDED = {"site-packages", "torch"}  # folders of a root that are roots of their own
HELD_OUT = 20  # one file in this many is for validation, and one for the test


@dataclass(frozen=True)
class Size:
    """How much text there is, in windows of how many bytes."""

    context: int
    megabytes: int


FULL = Size(256, 60)
LARGE = Size(256, 400)  # needs more than the standard library and torch
QUICK = Size(16, 1)


def sources(megabytes: int, folder: Path | None = None) -> dict[str, np.ndarray]:
    """Read source files as bytes; a hash of its name puts each whole file into one of three splits.

    The standard library comes first, then torch, then all other installed packages; or a folder of texts.
    """
    paths = sysconfig.get_paths()
    packages = [Path(paths["stdlib"]), Path(torch.__file__).parent, Path(paths["purelib"])]
    roots, suffixes = ([folder], TEXTS) if folder else (packages, SUFFIXES)
    found: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    total = 0
    for root in roots:
        files = (path for path in root.rglob("*") if path.suffix in suffixes and path.is_file())
        for path in sorted(p for p in files if p.relative_to(root).parts[0] not in EXCLUDED):
            if total >= megabytes * 1_000_000:
                break
            name = path.relative_to(root).as_posix()
            part = {0: "validation", 1: "test"}.get(crc32(name.encode()) % HELD_OUT, "train")
            text = path.read_bytes()
            found[part].append(text)
            total += len(text)
    return {part: np.frombuffer(b"\n".join(texts), dtype=np.uint8) for part, texts in found.items()}


def make_task(size: Size, folder: Path | None = None) -> Task:
    """Make the task of predicting the next byte, of sources or of the texts in a folder."""

    def split(data: np.ndarray) -> Split:
        count = (len(data) - 1) // size.context
        tokens = torch.from_numpy(data[: count * size.context + 1].astype(np.int64))
        return Split(tokens[:-1].view(count, -1), tokens[1:].view(count, -1))

    parts = {name: split(data) for name, data in sources(size.megabytes, folder).items()}
    return Task(
        name="sources",
        topology="transformer",
        input_shape=(size.context,),
        num_classes=256,
        train=parts["train"],
        validation=shuffled(parts["validation"]),
        held_out=TestSplit(shuffled(parts["test"]).subset(torch.arange(min(len(parts["test"]), 2048)))),
        host=HostSpec("gpt"),
    )


def peta(flops: float) -> str:
    """Return FLOPs as tables print them, in units of 1e15."""
    return f"{flops / 1e15:.3g}P"


def shuffled(split: Split) -> Split:
    """Return the same samples in a fixed random order, so that the first ones stand for all."""
    return split.subset(torch.from_numpy(np.random.default_rng(0).permutation(len(split))))
