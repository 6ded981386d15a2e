"""The examples start, say what they reached, draw, and own up when it is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import cartpole, masked, memory


@pytest.mark.parametrize("example", [cartpole, masked, memory], ids=lambda module: module.__name__)
def test_too_few_steps_are_owned_up_to(
    example: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curves" / "curve.png"
    status = example.main(["--steps", "2000", "--picture", str(picture)])  # type: ignore[attr-defined]
    assert status == 1
    assert f"stated {example.STATED:g}: NO" in capsys.readouterr().out  # type: ignore[attr-defined]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sorting_refuses_what_its_mask_forbids() -> None:
    env = masked.Sorting()
    env.reset(seed=0)
    item = env.action_space.sample()
    env.step(item)
    with pytest.raises(ValueError, match="choose what the action_mask allows"):
        env.step(item)


def test_the_cue_is_gone_when_it_is_asked_for() -> None:
    last = set()
    for seed in range(20):
        env = memory.Recall()
        seen, _ = env.reset(seed=seed)
        assert seen[: memory.CUES].argmax() == env.cue
        over = False
        while not over:
            asked = seen
            seen, reward, over, _, _ = env.step(env.cue)
        assert reward == 1.0
        last.add(asked.tobytes())
    assert len(last) == 1
