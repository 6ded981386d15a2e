"""The pages say what the code does: names, values, defaults, links and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from esper import cli
from esper.lifecycle.actions import (
    HEAD_CHOICES,
    HEADS_READ,
    SPEED_TICKS,
    TEMPO_TICKS,
    TOPOLOGY_BLUEPRINTS,
    Blueprint,
    Head,
    Op,
    selectable_blueprints,
)
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.gates import Gate
from esper.lifecycle.stages import Stage
from esper.simic.config import RewardConfig
from tests.tiny import sets

ROOT = Path(__file__).parent.parent
RULES = (ROOT / "docs/rules.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def row(first_cell: str, page: str = RULES) -> list[str]:
    """The cells of the table row that begins with this one."""
    found = [line for line in page.splitlines() if line.startswith(f"| {first_cell} |")]
    assert found, f"no table row begins with {first_cell}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


@pytest.mark.parametrize("stage", Stage)
def test_stages_and_their_values(stage: Stage) -> None:
    assert row(str(stage.value))[1] == stage.name


@pytest.mark.parametrize("head", HEAD_CHOICES)
def test_heads_and_their_choices_in_order(head: Head) -> None:
    names = re.findall(r"[A-Z][A-Z_]+", row(head.name.lower(), RULES.split("## The action")[1])[1])
    assert names == [choice.name for choice in HEAD_CHOICES[head]]


@pytest.mark.parametrize("op", Op)
def test_ops_and_the_heads_they_read(op: Op) -> None:
    rows = [line for line in RULES.splitlines() if line.startswith(f"| {op.name} |")]
    read = [cell.strip() for cell in rows[0].strip("|").split("|")][1]
    assert read == (", ".join(h.name.lower() for h in sorted(HEADS_READ[op])) or "nothing")


@pytest.mark.parametrize("topology", TOPOLOGY_BLUEPRINTS)
def test_blueprints_of_each_host(topology: str) -> None:
    assert row(topology)[1].split(", ") == [b.name for b in sorted(selectable_blueprints(topology))]
    assert Blueprint.NOOP.name not in row(topology)[1]


def test_gates_and_numbers_are_the_defaults() -> None:
    gates = LifecycleConfig().gates
    assert {gate.name for gate in Gate if gate is not Gate.NONE} == set(re.findall(r"^\| (G\d)", RULES, re.M))
    assert f"{gates.training_epochs} epochs" in row("G2")[2]
    assert f"at least {gates.min_health:g}".replace("0.", ".") in row("G2")[2]
    assert f"at least {gates.min_shadow_gain:g} points".replace("0.", ".") in row("G2")[3]
    assert f"{gates.blending_epochs} epochs" in row("G3")[3]
    assert f"age at least {LifecycleConfig().min_prune_age}" in row("PRUNE")[2]
    assert [f"{t.name} {ticks}" for t, ticks in TEMPO_TICKS.items()] == re.findall(
        r"[A-Z]+ \d", row("tempo")[1]
    )
    assert [f"{s.name} {n}" for s, n in SPEED_TICKS.items()] == re.findall(
        r"[A-Z]+ \d", row("alpha_speed")[1]
    )


def test_the_rent_of_the_glossary_is_the_default() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    assert f"`reward.rent_weight`, {RewardConfig().rent_weight:g} unless" in row("Φ, worth", page)[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


LONG = ("train", "grow", "compare")  # these get the tiny settings, so that they take seconds
SERVING = ("watch",)  # goes on until Ctrl-C: tests/watch has it


def readme_commands() -> list[str]:
    """Each once, in the order of the page: a run is trained before it is resumed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^    \.venv/bin/esper (.+?)(?:\s+#.*)?$", text, re.M)
    asides = [c for c in re.findall(r"`esper ([a-z][^`]*)`", text) if c.split()[0] not in (*LONG, *SERVING)]
    return list(dict.fromkeys((*blocks, *asides)))


@pytest.mark.usefixtures("blank_pictures")
def test_every_command_in_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.telemetry.report.write_report", lambda folder: folder.report_path)
    for command in readme_commands():
        words = shlex.split(command)
        more = sets() if words[0] in LONG else []
        few = ["--members", "2"] if words[0] in ("grow", "compare") else []
        assert cli.run([*words, *few, *more]) == 0, command


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(import .*?)```", text, re.S)[0].replace("epochs=20", "epochs=2")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert type(names["network"]).__module__.startswith("torch.")


def snippets_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.usefixtures("blank_pictures")
def test_a_task_of_ones_own_is_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moons.py").write_text(snippets_of("extend.md")[0])
    assert cli.run(["train", "--task", "moons:moons", "--out", "run", "--quiet", *sets()]) == 0


def test_a_blueprint_of_ones_own_takes_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.population import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    names: dict[str, object] = {}
    exec(compile(snippets_of("extend.md")[1], "extend.md", "exec"), names)
    seed = registry.build_blueprint(Blueprint.CONV_LIGHT, "cnn", 4, 2)
    assert type(seed) is names["WideConvolution"]
    assert sum(p.numel() for p in seed.parameters()) == registry.parameter_count(
        Blueprint.CONV_LIGHT, "cnn", 4, 2
    )


def test_the_schedule_of_the_page_is_one() -> None:
    names: dict[str, Any] = {}
    exec(compile(snippets_of("equal_compute.md")[0], "equal_compute.md", "exec"), names)
    assert [event.at for event in names["recipe"].events] == [0.05, 0.30]


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
