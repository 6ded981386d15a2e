"""The version, and the wheel in an environment that has nothing but what it asks for (`make long`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import esper
from tests.waiting import HOUR

ROOT = Path(__file__).parent.parent
CLIENT = """
import esper
from torch import nn

grown = esper.grow(nn.Linear(2, 2), train=None)
reveal_type(grown)
reveal_type(grown.report())
reveal_type(esper.estimate(nn.Linear(2, 2), tokens=1e6).saved)
esper.grow(train=3)
"""


def test_one_version_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", changes, re.M)[0] == esper.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == esper.__version__


def call(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command outside of the checkout; what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=HOUR,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel and the sdist."""
    pytest.importorskip("build")
    out, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("checkout") / "esper"
    # From a copy: an old build/ in the checkout would go into the wheel.
    copy.mkdir()
    for name in ("src", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    paths = os.pathsep.join(path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "src"))
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy]
    call(*words, cwd=out, PYTHONPATH=paths)
    return sorted(out.iterdir(), key=lambda path: path.suffix == ".whl")


def needed(package: str, found: set[str]) -> set[str]:
    """The distributions that a package needs without extras, and that those need, by name."""
    for text in distribution(package).requires or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            try:
                distribution(requirement.name)
            except PackageNotFoundError:  # of another platform, or a part of a CPU build
                continue
            found.add(requirement.name)
            needed(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def python(built: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with the wheel and, as links, what the core depends on."""
    home = tmp_path_factory.mktemp("empty") / "env"
    venv.create(home, with_pip=True)
    interpreter = home / "bin/python"
    site = Path(call(interpreter, "-c", "import site; print(site.getsitepackages()[0])", cwd=home).strip())
    for name in needed("esper-lite", set()):
        files = distribution(name).files or []
        root = Path(str(distribution(name).locate_file("")))
        for top in {path.parts[0] for path in files if path.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists() and (root / top).exists():
                (site / top).symlink_to(root / top)
    wheel = next(path for path in built if path.suffix == ".whl")
    call(interpreter, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    return interpreter


@pytest.mark.long
def test_what_is_built_passes_twine_and_is_complete(built: list[Path]) -> None:
    pytest.importorskip("twine")
    paths = os.pathsep.join(path for path in sys.path if path)
    call(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=built[0].parent, PYTHONPATH=paths)
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/esper").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped <= names
    assert sum(path.stat().st_size for path in built) < 20e6
    with tarfile.open(sdist) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} <= inside


@pytest.mark.long
def test_the_wheel_works_outside_of_the_checkout(python: Path, tmp_path: Path) -> None:
    where = call(python, "-c", "import esper; print(esper.__file__, esper.__version__)", cwd=tmp_path)
    assert str(python.parent.parent) in where
    assert where.split()[1] == esper.__version__
    command = ("compare", "--task", "spirals", "--members", "2", "--out", "run")
    said = call(python.parent / "esper", *command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "test accuracy, %" in said
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.long
def test_a_client_sees_the_types(python: Path, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "--strict", "client.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=HOUR,
    )  # fmt: skip
    shown = re.findall(r'Revealed type is "(.*?)"', done.stdout)
    assert shown == ["esper.growing.result.Grown", "str", "float"], done.stdout
    assert 'Missing positional argument "model"' in done.stdout
    assert "import-untyped" not in done.stdout
