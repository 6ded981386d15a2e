"""`make demo`: it goes on after an interruption, and its verdict is what the losses say."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from esper import cli
from esper.runs.run_folder import RunFolder
from esper.runs.schema import ControllerResult
from esper.utils.errors import UserError
from studies import demo
from studies.demo import ARMS, LESS, verdicts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few steps and samples, in threads: a second process would import torch for six seconds."""
    monkeypatch.setattr(demo, "TOKENS", 0.3)  # but more steps than the points of a curve
    monkeypatch.setattr(demo, "ProcessPoolExecutor", lambda workers, _: ThreadPoolExecutor(1))
    evaluate, few = demo.evaluate, torch.arange(32)
    monkeypatch.setattr(demo, "evaluate", lambda model, split: evaluate(model, split.subset(few)))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("quick")
def test_a_demo_goes_on_and_says_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, few, train = tmp_path / "demo", 2, demo.train
    given = ["--out", str(out), "--networks", "2"]

    def stop(*job: Any) -> None:
        """Ctrl-C, while other networks wait."""
        train(*job)
        if len(list((out / "networks").glob("*.json"))) == few:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            demo.main(given)
    networks = sorted((out / "networks").iterdir())
    assert few <= len(networks) < 2 * len(ARMS)
    assert {path.suffix for path in networks} == {".json"}, "nothing is half-written"
    kept = {path: path.stat().st_mtime_ns for path in networks[1:]}
    networks[0].unlink()
    assert RunFolder.read(out).results() is None
    assert cli.run(["resume", str(out)]) == 2
    assert f"go on with: python -m studies.demo --out {out}" in capsys.readouterr().err

    results = demo.main(given)
    assert {path: path.stat().st_mtime_ns for path in networks[1:]} == kept, "nothing is done twice"
    assert RunFolder.read(out).results() == results
    assert [arm.name for arm in results.controllers] == [arm.name for arm in ARMS]
    plain, *others, less = (list(arm.flops) for arm in results.controllers)
    for other in others:
        assert other == pytest.approx(plain, rel=0.05), "equal compute"
    assert less == pytest.approx([LESS * flops for flops in plain], rel=0.05)
    assert all(len(arm.curve) == demo.POINTS for arm in results.controllers)
    output = capsys.readouterr().out
    assert output.index(" of 8 networks are trained, about ") < output.index(results.verdicts[0])
    assert output.index(results.verdicts[0]) < output.index("report.html")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert '"sentences":["' + results.verdicts[0].split(":")[0] in page, "the report opens with the verdict"
    assert demo.main(given) == results
    with pytest.raises(UserError, match="holds a demo of 2 networks; choose another folder"):
        demo.main(["--out", str(out)])


@pytest.mark.parametrize(
    ("losses", "first", "third"),
    [
        ((2.0, 2.1, 1.7, 1.8), "Same network, 20% less compute", "behind"),
        ((2.0, 1.6, 1.8, 2.1), "Same network, same compute, lower loss", "ahead"),
        ((2.0, 2.2, 2.2, 2.3), "Growing was worse than plain training", "not clearly apart"),
        ((2.0, 2.2, 2.0, 2.3), "No difference", "behind"),
    ],
)
def test_the_verdict_is_what_the_losses_say(losses: tuple[float, ...], first: str, third: str) -> None:
    noise = ((0.01, -0.01, 0.02), (-0.01, 0.01, 0.02), (0.0, 0.02, -0.02), (0.01, 0.0, -0.01))
    arms = [
        ControllerResult(
            arm.name, [0, 1, 2], [0.5] * 3, [9.0] * 3, [1.0] * 3, [1e9 * arm.compute] * 3,
            test_loss=[loss + by for by in each],
        )
        for arm, loss, each in zip(ARMS, losses, noise, strict=True)
    ]  # fmt: skip
    sentences = verdicts(arms)
    assert sentences[0].startswith(first)
    assert third in sentences[2]
    assert ("half of its layers is better" in sentences[0]) == (third == "ahead")
