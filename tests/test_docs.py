"""Names, links, code blocks, commands and options of the pages exist and work."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from esper import cli
from esper.config import load_config
from examples.gpt import make, make_loaders
from tests.tiny import GROWING, sets

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https://)([^)#]+)(?:#L\d+)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pointers_to_code_lead_somewhere(page: Path) -> None:
    missing = []
    for file, name in re.findall(r"`([\w/]+)\.py:([\w.]+)`", page.read_text(encoding="utf-8")):
        try:
            attrgetter(name)(importlib.import_module("esper." + file.replace("/", ".")))
        except (ImportError, AttributeError):
            missing.append(f"{file}.py:{name}")
    assert missing == []


LONG = ("train", "grow", "compare")  # these get the tiny settings, so that they take seconds
SERVING = ("watch",)  # goes on until Ctrl-C: tests/watch has it
GUIDES = ("README.md", *(f"docs/{name}.md" for name in
          ("start", "grow_into", "loops", "grow_your_own", "controllers", "extend", "watch")))  # fmt: skip


def parse(command: str) -> tuple[str, str]:
    """The name of a command and all of its options, whether they were written in full or as one letter."""
    name, *rest = shlex.split(command)
    return name, repr(get_command(cli.app).commands[name].make_context(name, rest).params)  # type: ignore[attr-defined]


def commands_of_guides() -> list[tuple[str, str]]:
    """Page and command, each command once, in their order: a run is trained before it is resumed."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for page in GUIDES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^    (?:\.venv/bin/)?esper ([a-z].*?)(?:\s+#.*)?$", text, re.M)
        asides = [c for c in re.findall(r"`esper ([a-z][^`]*)`", text) if c.split()[0] not in LONG]
        for command in (*blocks, *asides):
            if command.split()[0] not in SERVING:
                found.setdefault(parse(command), (page, command))
    return list(found.values())


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a grown network, for the commands that want one."""
    out = tmp_path_factory.mktemp("grown") / "run"
    few = sets(tiny=GROWING)
    assert cli.run(["grow", "--task", "spirals", "-C", "schedule:clone@0", "--out", str(out), *few]) == 0
    return out


@pytest.mark.first
def test_every_command_of_a_guide_works(grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "model.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 2)\n")
    shutil.copytree(grown, tmp_path / "runs/mine")
    monkeypatch.setattr("esper.watch.report.write_report", lambda folder: folder.report_path)
    for page, command in commands_of_guides():
        words = shlex.split(command)
        more = sets() if words[0] == "train" else []
        few = ["--members", "2", *sets(tiny=GROWING)] if words[0] in ("grow", "compare") else []
        assert cli.run([*words, *few, *more]) == 0, f"{page}: esper {command}"


def test_the_commands_under_torchrun_are_understood() -> None:
    """tests/test_processes.py and tests/simic/test_shards.py run several processes."""
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    found = re.findall(r"^ +(?:torchrun .*)?-m esper (train|resume) (.+)$", text, re.M)
    assert [name for name, _ in found] == ["train", "resume", "train"]
    for name, rest in found:
        given = get_command(cli.app).commands[name].make_context(name, shlex.split(rest)).params  # type: ignore[attr-defined]
        load_config(preset=given.get("preset"), overrides=given["overrides"] or [])


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if page not in ("README.md", "docs/grow_your_own.md")]
)
def test_the_python_of_a_guide_is_part_of_a_script_that_the_tests_run(page: str) -> None:
    """The README and docs/grow_your_own.md are run as they are; tests/test_examples.py runs the scripts."""
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    without = [re.sub(r"^ +", "", script, flags=re.M) for script in scripts]
    missing = [b for b in blocks_of(page) if not any(re.sub(r"^ +", "", b, flags=re.M) in s for s in without)]
    assert missing == []


def test_the_python_of_the_readme_runs() -> None:
    train, val = make_loaders(samples=128)
    names: dict[str, Any] = {"model": make(), "train": train, "val": val}
    exec(compile(blocks_of("README.md")[0].replace("epochs=20", "epochs=1"), "README.md", "exec"), names)
    assert type(names["network"]) is type(names["model"])


def test_the_schedule_of_the_rules_is_one() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks_of("docs/rules.md")[0], "rules.md", "exec"), names)
    assert [line.at for line in names["recipe"].events] == [0.05, 0.30]


def test_pictures_show_the_files_of_today() -> None:
    """If this fails: python -m docs.make_pictures"""
    from docs.make_pictures import DOCS, PICTURES, recorded_digest  # imports matplotlib and optuna

    drawn = {name: recorded_digest(DOCS / name) for name in PICTURES}
    assert drawn == {name: drawing.digest() for name, drawing in PICTURES.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = re.findall(r"python -m ((?:benchmarks|studies|docs)\.\w+)", text)
    paths = {name: ROOT / name.replace(".", "/") for name in modules}
    missing = [
        name
        for name, path in paths.items()
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ]
    assert missing == []
    files = re.findall(r"`((?:tests|benchmarks|studies|examples|docs|src)/[\w./-]+\.\w+)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_a_page_gives_to_a_script_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\n", " ")
    calls = re.findall(r"python -m (benchmarks|studies)\.(\w+)((?: [^`#|]*?)?)(?=`|#|\||  )", text)
    for folder, name, options in calls:
        source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))
        for option in re.findall(r" (--[a-z-]+)", options):
            assert f'"{option}"' in source, f"{folder}.{name} has no option {option}"
