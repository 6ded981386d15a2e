"""Checkpoints: the same bits back, or one clear sentence; never anything between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from esper.runs.checkpoints import CheckpointError, CheckpointStore, load_checkpoint, save_checkpoint
from esper.utils.errors import UserError

SHARED = torch.arange(6.0)
TENSORS = {
    "host.segments.0/weight": torch.randn(3, 4),
    "alive": torch.tensor([True, False]),
    "a": SHARED,
    "b": SHARED,
    "view": SHARED[2:4],
    "rng": torch.arange(7, dtype=torch.uint8),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "none": torch.zeros(0, 3),
    "scalar": torch.tensor(3),
    "transposed": torch.randn(2, 5).T,
}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", TENSORS, {"round": 3, "slots": ["r0c0"]}, schema="abc")
    loaded = load_checkpoint(tmp_path / "c", schema="abc")
    assert same(loaded.tensors, TENSORS)
    assert loaded.record == {"round": 3, "slots": ["r0c0"]}
    loaded.tensors["host.segments.0/weight"].add_(1)  # writable, and nobody else's memory
    assert same(load_checkpoint(tmp_path / "c").tensors, TENSORS)


def test_a_record_cannot_pose_as_the_header(tmp_path: Path) -> None:
    record = {"note": '"digest":"' + "f" * 64 + '"', "digest": "f" * 64, "format": "esper-checkpoint"}
    save_checkpoint(tmp_path / "c", {"digest": torch.ones(2)}, record, schema="")
    assert load_checkpoint(tmp_path / "c").record == record


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One of: cut short, bytes flipped, a piece doubled or lost, noise of any length, noise with our head."""
    kind = draw.randrange(6)
    at = draw.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 2, 40])):
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return data[:at] + data[at : at + draw.randrange(1, 9)] + data[at:]
    if kind == 3:
        return data[:at] + data[at + draw.randrange(1, 9) :]
    if kind == 4:
        return draw.randbytes(draw.randrange(0, 600))
    return data[:at] + draw.randbytes(len(data) - at)


def test_a_thousand_damaged_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, TENSORS, {"round": 3}, schema="abc")
    whole = path.read_bytes()
    draw = random.Random(0)
    flips = [1 << bit for bit in range(64)]  # every length of the header that is one bit off
    lengths = [(int.from_bytes(whole[:8], "little") ^ flip).to_bytes(8, "little") for flip in flips]
    refused = 0
    for data in [*(length + whole[8:] for length in lengths), *(damaged(whole, draw) for _ in range(940))]:
        path.write_bytes(data)
        try:
            loaded = load_checkpoint(path, schema="abc")
        except CheckpointError as error:
            refused += "\n" not in str(error)
        else:
            assert data == whole
            assert same(loaded.tensors, TENSORS)
    assert refused >= 990


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:  # foreign ones: tests/test_damaged.py
    with pytest.raises(UserError, match=r"cannot read .*: no such file"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a directory"):
        load_checkpoint(tmp_path)


def test_the_store_keeps_last_and_a_few_periodic(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, every=1)
    for number in range(1, 8):
        store.save(number, {"w": torch.full((2,), float(number))}, {}, schema="s")
    assert load_checkpoint(store.last, "s").record["round"] == 7
    assert load_checkpoint(store.last).tensors["w"][0] == 7.0
    assert [p.name for p in store.periodic()] == [f"round-00000{i}.safetensors" for i in (5, 6, 7)]
    assert load_checkpoint(store.periodic()[0]).tensors["w"][0] == 5.0, "a second name is not overwritten"
    assert len(list(tmp_path.iterdir())) == 4
