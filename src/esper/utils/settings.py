"""The base class of settings, and the way from YAML files and `--set a.b=c` to checked ones and back.

Every mistake is reported in one sentence with the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from esper.utils.errors import UserError


class Config(BaseModel):
    """Frozen settings; unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


AnyConfig = TypeVar("AnyConfig", bound=Config)
_MAX_SHOWN = 60


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 3e-4 is a number, 010 and 1:30 are none, a key that is written twice is a
    mistake, and there are no aliases, so that a small file cannot unfold into a large one.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed; write it again", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubles = [key for i, key in enumerate(keys) if key in keys[:i]]
        if doubles:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {doubles[0]!r} is written twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 3e-4, without a dot, as a text, 010 as 8 and 1:30 as 90.
_INT = "tag:yaml.org,2002:int"
_known = yaml.SafeLoader.yaml_implicit_resolvers.items()  # by first character: pairs of a tag and a pattern
_Loader.yaml_implicit_resolvers = {first: [p for p in pairs if p[0] != _INT] for first, pairs in _known}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; raise UserError with one sentence about what is wrong with it."""
    try:
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where} is not valid YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError, AttributeError) as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split()) or 'too deep'}") from None
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # dates, bytes, sets, NaN, nested too deep
        raise UserError(
            f"{where} holds a value that is not allowed ({error}); only finite numbers, texts in quotes, "
            "true, false, null, lists, and keys with values are"
        ) from None
    return value


def read_yaml(path: Path | str) -> dict[str, Any]:
    """Read a file of keys and values; an empty file has none."""
    path = Path(path)
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file; give a YAML file of settings") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {shown(value)}; expected keys and values such as 'seed: 7'")
    return value


def parse_override(text: str) -> dict[str, Any]:
    """Parse `a.b=c` to {a: {b: c}}, with c read as YAML."""
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise UserError(f"--set is {shown(text)}; expected key=value, for example lifecycle.max_seeds=3")
    nested = parse_yaml(value, f"the value of --set {key}")
    for name in reversed(names):
        nested = {name: nested}
    return dict(nested)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, key by key; lists are replaced whole."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def build(kind: type[AnyConfig], data: Mapping[str, Any]) -> AnyConfig:
    """Check `data` against a config class, strictly: '5' is no number and true is no 1."""
    # By way of JSON, because strict mode would else refuse a list for a tuple, which is all that YAML has.
    try:
        return kind.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # One sentence: the first problem often causes the others.
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(describe_problem(kind, data, dict(problems[0])) + more) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"the configuration cannot be read: {error}") from None


def dump(config: Config) -> str:
    """Write a configuration as YAML that `build` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def keys_of(kind: type[Config], above: str = "") -> Iterator[str]:
    """List the dotted name of every leaf of a config class, in the order of its fields."""
    for name, field in kind.model_fields.items():
        inner = _config_class(field.annotation)
        yield from keys_of(inner, f"{above}{name}.") if inner is not None else [above + name]


def explain(config: Config, indent: int = 0) -> Iterator[str]:
    """Write a configuration as lines of YAML, each with its meaning as a comment."""
    for name, field in type(config).model_fields.items():
        value, pad = getattr(config, name), " " * indent
        if isinstance(value, Config):
            yield f"{pad}{name}:  # {field.description}"
            yield from explain(value, indent + 2)
        else:
            yield f"{pad}{name}: {json.dumps(value)}  # {field.description}"  # JSON is YAML too


def shown(value: Any) -> str:
    """Return a value as the person wrote it, shortened."""
    text = " ".join(repr(value).split())  # some objects describe themselves in several lines
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _config_class(annotation: Any) -> type[Config] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Config) else None


def describe_problem(kind: type[Config], data: Any, problem: dict[str, Any]) -> str:
    """Describe one pydantic problem in one sentence: the key, its value, and what is wrong with it."""
    inner: type[Config] | None = kind
    value, path = data, ""
    for part in problem["loc"]:
        if inner is not None and part not in inner.model_fields:
            near = difflib.get_close_matches(str(part), inner.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known here are {', '.join(inner.model_fields)}"
            return f"{path}.{part} is not a setting; {hint}".removeprefix(".")
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):  # behind the key itself: which type of a union it is not
            break
        inner = _config_class(inner.model_fields[part].annotation) if inner is not None else None
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if problem["type"] != "value_error":
        reason = problem["msg"].replace("Input ", "it ", 1).replace("Tuple ", "the list ", 1)
    else:  # raised by a validator of the class, with a whole sentence
        reason = str(problem["ctx"]["error"])
        if inner is not None:  # about a group of settings, whose values are too many to show
            return f"{path or 'the configuration'} does not fit together: {reason}"
    return f"{path or 'the configuration'} is {shown(value)}; {reason}"
