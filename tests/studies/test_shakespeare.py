"""Time to a loss on tinyshakespeare: splits, the schedule, and runs that end once they have the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from studies import shakespeare
from studies.shakespeare import Arm, Size, cheapest, load_text, rate_share, table, time_steps, train

TINY = Size(width=16, depth=4, heads=2, context=16, batch=16, warmup=5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "input.txt"
    path.write_text("to be or not to be, that is the question\n" * 100)
    return path


def test_the_last_tenth_of_the_text_is_for_validation(text: Path) -> None:
    training, validation, vocabulary = load_text(text, 16)
    whole = text.read_text()
    letters = sorted(set(whole))
    assert vocabulary == len(letters)
    assert "".join(letters[k] for k in training.inputs[0]) == whole[:16]
    assert torch.equal(training.inputs[0, 1:], training.targets[0, :-1])
    cut = len(whole) * 9 // 10
    assert "".join(letters[k] for k in validation.targets.flatten()[:20]) == whole[cut + 1 : cut + 21]


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    shares = [rate_share(step, 1000, 100) for step in range(1000)]
    assert shares[0] == pytest.approx(1 / 101)
    assert max(shares) == shares[100] == 1.0
    assert shares[100:] == sorted(shares[100:], reverse=True)
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)


def test_runs_end_once_they_have_the_loss(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_text(text, TINY.context)
    monkeypatch.setattr(shakespeare, "EVERY", 10)
    monkeypatch.setattr(shakespeare, "TARGET", 1.5)
    plain, grown = (train(Arm(400, at, 1e-2), data, "cpu", TINY) for at in (0.0, 0.05))
    for run in (plain, grown):
        assert run["reached"]
        assert run["curve"][-1][2] <= 1.5 < min(loss for *_, loss in run["curve"][:-1])
        assert 20 < run["steps_taken"] < 400
    # Half of the layers cost less while they are alone.
    assert grown["flops"] / grown["steps_taken"] < plain["flops"] / plain["steps_taken"]

    runs = [plain, grown, *({**run, "seed": seed} for run in (plain, grown) for seed in (1, 2))]
    assert cheapest(runs, grown=True) == Arm(400, 0.05, 1e-2)
    assert cheapest([plain], grown=True) is None
    saved = 100 * (grown["flops"] / plain["flops"] - 1)
    assert f"grown against plain: {saved:+.1f} ± 0.0 % FLOPs, 2 seeds" in table(runs)


def test_runs_alone_on_a_gpu_give_the_seconds_of_steps() -> None:
    def run(at: float, taken: int, seconds: float, seed: int = 0) -> dict[str, Any]:
        arm = Arm(1000, at, seed=seed)
        return {
            **{name: getattr(arm, name) for name in ("name", "steps", "grow_at", "rate", "seed")},
            "reached": True, "steps_taken": taken, "flops": 1e3 * taken - 500 * at, "best": 1.4,
            "training_seconds": seconds,
        }  # fmt: skip

    # A step takes 4 s, and 1 s with half of the layers.
    alone = [run(0.2, 900, 200 + 4 * 700), run(0.4, 900, 400 + 4 * 500), run(0.4, 700, 400 + 4 * 300)]
    assert time_steps(alone) == pytest.approx([1, 4])
    shared = [run(at, 500, 7.0, seed) for at in (0.0, 0.25) for seed in (0, 1, 2)]
    text = table(shared, alone)
    assert "a step alone: 4000.00 ms, with half of the layers 1000.00 ms" in text
    assert "-37.5 ± 0.0 % seconds, 2 seeds, means 1.25e+03 and 2e+03" in text
