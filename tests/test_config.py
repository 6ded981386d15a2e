"""Configuration: what is written is what is run, and every mistake is named."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest

from esper.config import RunConfig, load_config, preset_names
from esper.lifecycle.config import GateConfig
from esper.utils.errors import UserError
from esper.utils.settings import build, dump, keys_of, parse_yaml

KEYS = list(keys_of(RunConfig))


def nested(path: str, value: object) -> dict[str, object]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("path", KEYS)
def test_a_wrong_value_and_an_unknown_key_are_named(path: str) -> None:
    """No setting takes a mapping, and every one that takes a number refuses a text."""
    name = path.split(".")[-1]
    default = reduce(getattr, path.split("."), RunConfig())
    wrong = ["maybe", 7] if isinstance(default, bool) else ["three", True]
    for value in ({"deep": 3}, *(wrong if isinstance(default, int | float) else [])):
        with pytest.raises(UserError) as caught:
            build(RunConfig, nested(path, value))
        said = str(caught.value)
        assert said.startswith(f"{path} is {value!r}; ")
        assert "should " in said or "must " in said
    with pytest.raises(UserError, match="is not a setting") as caught:
        build(RunConfig, nested(path + "x", 1))
    assert str(caught.value).startswith(path + "x")
    assert repr(name) in str(caught.value)


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("members: 5\nlifecycle:\n  max_seeds: 3\n")
    config = load_config(file, "demo", ["lifecycle.gates.min_health=3e-1", "telemetry.sinks=[wandb]"])
    assert config.seed == 7, "from the preset"
    assert config.members == 5, "from the file"
    assert config.lifecycle.max_seeds == 3
    alone = load_config(preset="demo")
    assert alone.lifecycle.gates.training_epochs != GateConfig().training_epochs
    assert config.lifecycle.gates.training_epochs == alone.lifecycle.gates.training_epochs, "key by key"
    assert config.lifecycle.gates.min_health == 0.3, "3e-1 is a number"
    assert config.telemetry.sinks == ("wandb",)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_survive_a_dump(name: str) -> None:
    config = load_config(preset=name)
    assert config.ppo.gamma == 1.0, "a discount would reward ending sooner where compute is the clock"
    assert build(RunConfig, parse_yaml(dump(config), "dump")) == config


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("members", "expected key=value"),
        ("=3", "expected key=value"),
        ("a..b=3", "expected key=value"),
        ("members=[1", "not valid YAML"),
        ("members=2020-01-01", "type date"),
        ("ppo.gamma=.nan", "only finite numbers"),
        ("ppo.gamma=.inf", "only finite numbers"),
        ("lifecycle=3", "lifecycle is 3; it should be an object"),
        (b"\xff\xfe\x00", "is not a text file"),
        (b"- 1\n- 2\n", "expected keys and values"),
        (b"a: 1\na: 2\n", "line 1: the key 'a' is written twice"),
        (b"a: [1,\n", "not valid YAML in line"),
        (b"a: !!python/object:os.system x\n", "not valid YAML in line 1"),
        (b"3: 4\n", "3 is not a setting"),
        (b"? [1]\n: 2\n", "not valid YAML"),
    ],
)
def test_bad_overrides_and_files_are_one_sentence(tmp_path: Path, given: str | bytes, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(given if isinstance(given, bytes) else b"")
    with pytest.raises(UserError) as caught:
        load_config(file, overrides=[given] if isinstance(given, str) else [])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deep_nesting_and_alias_bombs_are_refused() -> None:
    laughs = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
    for text in ("[" * 600, "[" * 150 + "]" * 150, "a: " + "{b: " * 1000, "l0: &l0 lol\n" + laughs):
        with pytest.raises(UserError):
            build(RunConfig, {"members": parse_yaml(text, "bomb")})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("10", 10),
        ("-1_000", -1000),
        ("0", 0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x1f", "0x1f"),
    ],
)
def test_what_looks_like_a_number_to_people_is_one(text: str, value: object) -> None:
    assert parse_yaml(text, "a setting") == value
