"""`esper demo`: it is completed after an interruption, and its verdict is what the losses say."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from esper import cli
from esper.commands import demo_networks
from esper.commands.demo_networks import ARMS, LESS, verdicts
from esper.runs.run_folder import RunFolder
from esper.runs.schema import ControllerResult
from tests.tiny import sets

PATIENCE = 120  # seconds for eight small networks, or for a process to end, on a busy machine


def test_a_demo_is_completed_and_says_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_networks, "TOKENS", 0.3)  # few steps, but more than the points of a curve
    monkeypatch.setattr(demo_networks, "WORKERS", 1)  # each takes seconds to import torch
    monkeypatch.setattr("esper.commands.demo.FRESH", 6)
    out, few = tmp_path / "demo", 2

    def stop(*given: object) -> None:
        """Ctrl-C, while a process trains another network."""
        end = time.monotonic() + PATIENCE
        while len(list((out / "networks").glob("*.json"))) < few and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("esper.commands.demo.try_controller", stop)
        assert cli.run(["demo", "--out", str(out), "-n", "2", *sets("task=spirals")]) == 130
    assert f"esper resume {out}" in capsys.readouterr().err
    end = time.monotonic() + PATIENCE
    # A thread of the pool waits for the same processes: for a moment nobody knows that one has ended.
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.02)
    assert not multiprocessing.active_children(), "no process is left behind"
    networks = sorted((out / "networks").iterdir())
    assert few <= len(networks) <= 2 * len(ARMS)
    assert {path.suffix for path in networks} == {".json"}, "nothing is half-written"
    kept = {path: path.stat().st_mtime_ns for path in networks[1:]}
    networks[0].unlink()
    assert RunFolder.read(out).results() is None

    # The others in a thread, and on little data: a second process would import torch for six seconds.
    monkeypatch.setattr(demo_networks, "ProcessPoolExecutor", lambda workers, _: ThreadPoolExecutor(workers))
    evaluate, few_samples = demo_networks.evaluate, torch.arange(32)
    monkeypatch.setattr(
        demo_networks, "evaluate", lambda model, split: evaluate(model, split.subset(few_samples))
    )
    assert cli.run(["resume", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in networks[1:]} == kept, "nothing is done twice"
    results = RunFolder.read(out).results()
    assert results is not None
    assert [arm.name for arm in results.controllers] == [arm.name for arm in ARMS]
    plain, *others, less = ([flops for flops in arm.flops] for arm in results.controllers)
    for other in others:
        assert other == pytest.approx(plain, rel=0.05), "equal compute"
    assert less == pytest.approx([LESS * flops for flops in plain], rel=0.05)
    assert all(len(arm.curve) == demo_networks.POINTS for arm in results.controllers)
    output = capsys.readouterr().out
    assert output.index(results.verdicts[0]) < output.index("report.html")
    assert re.search(r"the same ones left alone: [-+][\d.]+ ± [\d.]+ points .* on \d+ fresh tables", output)
    assert re.search(r"What it learned: it doubles the rate of \d+% of them", output)
    assert re.search(r"a simple rule .*: [-+][\d.]+ ± [\d.]+ points", output)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert '"sentences":["' + results.verdicts[0].split(":")[0] in page, "the report opens with the verdict"
    assert cli.run(["resume", str(out)]) == 0
    assert "nothing is left to do" in capsys.readouterr().out


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
