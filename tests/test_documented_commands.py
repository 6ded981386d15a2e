"""No growth that the pages show is behind plain training: every such command, block and example is run.

The quick tests hold the collector; `make long` runs what it finds. Reduced: at most MEMBERS networks an arm,
SEEDS runs of a block, and blocks that do not make a model of their own grow a perceptron on letter.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.runs.run_folder import RunFolder
from esper.tasks import load_task
from esper.utils.statistics import mean_interval

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEMBERS, SEEDS = 4, 3
UNGROWN = ("static", "fixed:", "best-of", "final:")
# Examples by the number of their own comparison: main() returns a Gain, or test losses in another form.
EXAMPLES: Mapping[str, Callable[[Any], tuple[float, float]]] = {
    name: lambda gain: (gain.mean, gain.half_width) for name in ("grow_adapters", "grow_mlp", "own_loop")
}

_COMMAND = re.compile(r"(?:\S*\besper|-m esper) (grow|compare|demo)\b([^`#\n]*)")
_BLOCK = re.compile(r"```python\n(.*?)```", re.S)
_EXAMPLE = re.compile(r"examples/(\w+)\.py")
_GROWS = re.compile(r"controller=(?!\"static\")")


def commands_in(page: str) -> list[list[str]]:
    """The commands of a page that grow something, as arguments of esper.

    A line of code counts as it is; in the middle of a sentence a command needs an option to be more than a
    name. Raises ValueError for one that grows with the controller of a run, which nobody has here.
    """
    prose = _BLOCK.sub("", page)
    lines = [line for line in prose.splitlines() if line.startswith("    ")]
    spans = re.findall(r"`([^`\n]+)`", "\n".join(x for x in prose.splitlines() if not x.startswith("    ")))
    found = [_COMMAND.search(text) for text in (*lines, *(span for span in spans if " -" in span))]
    commands = [[match[1], *shlex.split(match[2])] for match in found if match]
    if any(re.search(r"(^|\s)make demo\b", text) for text in (*lines, *spans)):
        commands.append(["demo"])
    for command in commands:
        words = zip(command[1:], command, strict=False)
        if any("runs/" in word for word, before in words if before != "--out"):
            raise ValueError(f"esper {shlex.join(command)} needs a run; show one that anybody can repeat")
    return commands


def blocks_in(page: str) -> list[str]:
    """The blocks of Python that grow a model; raises ValueError for one that grows without `esper.grow`."""
    found = [block for block in _BLOCK.findall(page) if _GROWS.search(block)]
    for block in found:
        if "esper.grow(" not in block:
            raise ValueError(f"nothing here runs this block, so that it may do harm: {block}")
    return found


def examples_in(page: str) -> list[str]:
    """The examples that a page names and that grow a model; raises ValueError for one without a check."""
    named = sorted(set(_EXAMPLE.findall(page)))
    found = [n for n in named if _GROWS.search((ROOT / "examples" / f"{n}.py").read_text(encoding="utf-8"))]
    for name in found:
        if name not in EXAMPLES:
            raise ValueError(f"nothing here runs examples/{name}.py, so that it may do harm")
    return found


def collected(find: Callable[[str], list[Any]]) -> list[Any]:
    """What there is of a kind on all pages, each once."""
    everything = [item for page in PAGES for item in find(page.read_text(encoding="utf-8"))]
    return [item for k, item in enumerate(everything) if item not in everything[:k]]


def to_run(find: Callable[[str], list[Any]]) -> list[Any]:
    """The same; nothing where something is not covered, which a test above says."""
    try:
        return collected(find)
    except ValueError:
        return []


# ---- the collector -----------------------------------------------------------------------------------------


def test_commands_are_found_in_code_and_in_sentences() -> None:
    page = (
        "`esper grow` is a command, and so is `esper compare -C static,habit`.\n\n"
        "    .venv/bin/esper grow --task digits --out runs/grown   # a minute\n"
        "    make demo\n    esper train --task digits\n"
    )
    assert commands_in(page) == [
        ["grow", "--task", "digits", "--out", "runs/grown"],
        ["compare", "-C", "static,habit"],
        ["demo"],
    ]
    with pytest.raises(ValueError, match="needs a run"):
        commands_in("    torchrun -m esper compare --controllers static,runs/four\n")


def test_blocks_that_grow_are_found_and_others_refused() -> None:
    plain = '```python\nesper.grow(model, x)\nesper.grow(model, x, controller="static")\n```\n'
    grows = '```python\nesper.grow(model, x, controller="habit")\n```\n'
    assert blocks_in(plain + grows) == [grows[10:-4]]
    with pytest.raises(ValueError, match="nothing here runs this block"):
        blocks_in(grows.replace("esper.grow", "esper.Grower"))


def test_examples_without_a_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "[one](../examples/grow_mlp.py) and [another](../examples/maskable_ppo.py)"
    assert examples_in(page) == ["grow_mlp"]
    monkeypatch.delitem(EXAMPLES, "grow_mlp")
    with pytest.raises(ValueError, match=r"nothing here runs examples/grow_mlp\.py"):
        examples_in(page)


@pytest.mark.parametrize("find", [commands_in, blocks_in, examples_in])
def test_whatever_the_pages_show_is_covered(find: Callable[[str], list[Any]]) -> None:
    assert collected(find)


# ---- what it finds -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("command", to_run(commands_in), ids=shlex.join)
def test_no_arm_that_grows_is_behind_static(command: list[str], tmp_path: Path) -> None:
    kept = re.sub(r"(--out|-o|--members|-n) \S+", "", shlex.join(command))
    members = [] if command[0] == "demo" else ["--members", str(MEMBERS)]
    arguments = [*shlex.split(kept), "--out", str(tmp_path / "run"), *members]
    for block in chain.from_iterable(_BLOCK.findall(page.read_text(encoding="utf-8")) for page in PAGES):
        if named := re.match(r"# (\w+\.py)\n", block):  # a module of the reader's own
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
    esper_command = [sys.executable, "-m", "esper", *arguments]
    done = subprocess.run(esper_command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = RunFolder.read(tmp_path / "run").results()
    assert results is not None
    assert results.controllers[0].name == "static"
    behind = {
        found.controller: f"{100 * found.mean:+.1f} ± {100 * found.ci:.1f} points"
        for found in results.differences
        if found.quantity == "test_accuracy"
        and not found.controller.startswith(UNGROWN)
        and found.mean + found.ci < 0
    }
    assert not behind


@pytest.mark.long
@pytest.mark.parametrize("block", to_run(blocks_in))
def test_no_block_grows_a_model_that_is_behind_plain_training(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = load_task("letter")
    splits = [TensorDataset(letter.train.inputs, letter.train.targets)]
    splits.append(TensorDataset(letter.validation.inputs, letter.validation.targets))
    grow, apart = esper.grow, list[float]()

    def beside_its_baseline(*given: Any, **settings: Any) -> Any:
        fair = {"lr": 1e-2, "epochs": 8, **settings, "baseline": True, "progress": False, "seed": seed}
        grown = grow(*given, **fair)
        assert grown.baseline is not None
        apart.append(float(grown.record.accuracy[-1, 0] - grown.baseline.record.accuracy[-1, 0]))
        return grown

    monkeypatch.setattr(esper, "grow", beside_its_baseline)
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        names = {
            "esper": esper,
            "model": nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 26)),
            "loader": DataLoader(splits[0], 128, shuffle=True),
            "val_loader": DataLoader(splits[1], 512),
        }
        exec(compile(block.replace("manual_seed(0)", f"manual_seed({seed})"), "page", "exec"), names)
    mean, half = mean_interval(apart)
    assert mean + half >= 0, apart


@pytest.mark.long
@pytest.mark.parametrize("name", to_run(examples_in))
def test_no_example_is_behind_what_it_is_compared_with(name: str) -> None:
    mean, half = EXAMPLES[name](importlib.import_module(f"examples.{name}").main())
    assert mean + half >= 0
