from __future__ import annotations

from pathlib import Path

import pytest

from esper.runs.files import file_in
from esper.utils.errors import UserError
from esper.watch.library import Library


def make_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "versions.json").write_text("{}")
    return path


def test_runs_are_found_in_a_folder_and_as_a_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "deep" / "b")
    make_run(tmp_path / "runs" / "too" / "deep" / "c")
    alone = make_run(tmp_path / "alone")
    assert list(Library([tmp_path / "runs", alone]).runs()) == ["a", "deep/b", "alone"]


def test_names_are_unique_and_a_run_is_listed_once(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "x" / "demo"), make_run(tmp_path / "y" / "demo")
    assert Library([one, two, one, tmp_path / "x"]).runs() == {"demo": one, "y/demo": two}


def test_a_new_run_appears(tmp_path: Path) -> None:
    library = Library([tmp_path])
    assert library.runs() == {}
    make_run(tmp_path / "late")
    assert list(library.runs()) == ["late"]


def test_links_out_of_the_given_folders_are_passed_over(tmp_path: Path) -> None:
    secret = make_run(tmp_path / "elsewhere" / "secret")
    given = tmp_path / "given"
    run = make_run(given / "mine")
    (given / "link").symlink_to(secret)
    assert list(Library([given]).runs()) == ["mine"]
    (run / "metrics.jsonl").symlink_to(secret / "versions.json")
    with pytest.raises(UserError, match="leads out of the run's folder"):
        file_in(run, "metrics.jsonl")


@pytest.mark.parametrize("name", ["", "..", "../elsewhere", "/etc", "mine/../..", "none"])
def test_a_name_that_is_not_listed_is_refused(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "mine")
    with pytest.raises(UserError, match="there is no run"):
        Library([tmp_path]).find(name)


def test_a_folder_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder at"):
        Library([tmp_path / "nothing"])
