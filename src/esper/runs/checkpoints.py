"""Checkpoints: tensors by name and a JSON record, in one safetensors file.

A checkpoint cannot run code when it is loaded, is written whole or not at all, and carries a digest of
all its bytes, so that damage anywhere in it is found before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from esper.runs.files import disk_errors, write_atomically
from esper.utils.errors import UserError

FORMAT = "esper-checkpoint"
VERSION = "1"
_BLANK = "0" * 64
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
_MAX_HEADER = 100_000_000
PERIODIC_KEPT = 3  # checkpoints of a run, the newest: enough to go back behind a mistake
Tensors = Mapping[str, Tensor]


class CheckpointError(UserError):
    """A checkpoint that is damaged, foreign, or of another schema."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]


def save_checkpoint(path: Path | str, tensors: Tensors, record: Mapping[str, Any], schema: str) -> None:
    """Write a checkpoint atomically. `schema` is a hash of the layout it fits; loading compares it."""
    write_atomically(Path(path), _encoded(tensors, record, schema))


def _encoded(tensors: Tensors, record: Mapping[str, Any], schema: str) -> bytearray:
    """Return a checkpoint as the bytes of its file."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "schema": schema,
        "record": json.dumps(record, allow_nan=False),
        "digest": _BLANK,
    }
    data = bytearray(save_safetensors(_separate_storage(tensors), metadata=header))
    # The digest covers every byte of the file, with zeros where it will stand itself.
    found = _DIGEST.search(data)
    assert found is not None, "the header was just written"
    start, end = found.span(1)
    data[start:end] = hashlib.sha256(data).hexdigest().encode()
    return data


def load_checkpoint(
    path: Path | str, schema: str | tuple[str, ...] | None = None, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Read a checkpoint, or say in one sentence what is wrong with it.

    schema: what it must have been made for, one of several where several will do; None takes any.
    """
    path = Path(path)
    with disk_errors("read", path):
        data = bytearray(path.read_bytes())
    header = json.loads(_check_bytes(path, data))["__metadata__"]
    if header["version"] != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {header['version']!r}; this esper reads {VERSION!r}: "
            "use the version of esper that wrote it"
        )
    allowed = (schema,) if isinstance(schema, str) else schema
    if allowed is not None and header["schema"] not in allowed:
        raise CheckpointError(
            f"{path} was made for schema {header['schema']!r}, and this run has "
            f"{' or '.join(map(repr, allowed))}: what a controller sees or may choose differs; "
            "use the esper that wrote it, or train anew"
        )
    try:
        tensors = load_safetensors(bytes(data))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Checkpoint(placed, json.loads(header["record"]))


def _check_bytes(path: Path, data: bytearray) -> bytes:
    """Return the header and blank the digest in `data`; raise CheckpointError for other or damaged bytes."""
    header_size = int.from_bytes(data[:8], "little")  # anything, in a damaged file
    header = bytes(data[8 : 8 + min(header_size, _MAX_HEADER)])
    found = _DIGEST.search(header)
    if f'"format":"{FORMAT}"'.encode() not in header or found is None:
        raise CheckpointError(f"{path} is no checkpoint of esper, or damaged; give a file that a run wrote")
    expected = found[1].decode()
    data[8 + found.start(1) : 8 + found.end(1)] = _BLANK.encode()
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged: its digest is another; use an older checkpoint")
    return header


def _separate_storage(tensors: Tensors) -> dict[str, Tensor]:
    """Return the same tensors on the CPU, each in memory of its own, as safetensors demands."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in tensors.items():
        # safetensors refuses tensors that share memory, as tied weights and views do.
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return separate


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run: `last` always, and every so often one that stays."""

    folder: Path
    every: int = 10  # rounds between periodic checkpoints, of which the newest three stay; 0 keeps none

    @property
    def last(self) -> Path:
        """Path of the newest checkpoint, from which a run goes on."""
        return self.folder / "last.safetensors"

    def periodic(self) -> list[Path]:
        """Return the periodic checkpoints, the oldest first."""
        return sorted(self.folder.glob("round-*.safetensors"))

    def save(self, round: int, tensors: Tensors, record: Mapping[str, Any], schema: str) -> None:
        """Write `last`, and before it the same as a periodic one that is due; the record gets `round`."""
        data = _encoded(tensors, {**record, "round": round}, schema)
        # `last` is written last: a kill in between leaves the one before, and the round is done again.
        if self.every and round % self.every == 0:
            write_atomically(self.folder / f"round-{round:06d}.safetensors", data)
        write_atomically(self.last, data)
        with disk_errors("remove old checkpoints in", self.folder):
            for path in self.periodic()[:-PERIODIC_KEPT]:
                path.unlink()
