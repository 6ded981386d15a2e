"""Options of studies and benchmarks; bad ones end them as in `esper`, with one sentence and exit code 2."""

from __future__ import annotations

import gzip
import json
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, RawTextHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from esper.config import RunConfig, load_config
from esper.utils.devices import own_device
from esper.utils.errors import UserError
from esper.utils.launch import Launch

T = TypeVar("T")


def run(main: Callable[[], None]) -> None:
    """Run a program; of several processes one that fails says in one line which it is."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if Launch.of().size == 1:
            raise
        sys.exit(f"{Launch.of()}: {type(error).__name__}: {' '.join(str(error).split())}")


def run_trainings(
    arguments: Sequence[str] | None,
    description: str | None,
    trainings: int,
    judge: Callable[[RunConfig, int], Iterable[dict[str, Any]]],
    report: Callable[[Sequence[dict[str, Any]]], str],
    judge_budget: Callable[[RunConfig, int, float], Iterable[dict[str, Any]]] | None = None,
) -> None:
    """Train with the preset `demo` and judge, or print the report of a file.

    trainings: how many by default; with 0 there is no option for it. judge: takes the settings and the number
    of trainings; each of its records becomes a line of JSON as soon as it is there. judge_budget: does so
    where the option --budget is given, and takes it too; without this function there is no such option.
    """
    parser = ArgumentParser(description=description, formatter_class=RawTextHelpFormatter)
    parser.set_defaults(trainings=0)
    if trainings:
        parser.add_argument("--trainings", type=positive, default=trainings)
    parser.set_defaults(budget=None)
    if judge_budget:
        parser.add_argument("--budget", type=float, help="another budget, in units of the usual one")
    parser.add_argument("--out", type=Path, help="a file that gets the results as lines of JSON")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="a setting, as in esper")
    parser.add_argument("--read", type=Path, nargs="+", help="files to report on")
    given = parser.parse_args(arguments)
    if given.read:
        lines = [line for path in given.read for line in read_text(path).splitlines()]
        print(report([json.loads(line) for line in lines]))
        return
    if given.out is None:
        parser.error("give --out to train, or --read to report")
    torch.set_num_threads(1)
    records, config = [], load_config(preset="demo", overrides=given.overrides)
    if judge_budget and given.budget is not None:
        found = judge_budget(config, given.trainings, given.budget)
    else:
        found = judge(config, given.trainings)
    with given.out.open("w") as file:
        for record in found:
            line = json.dumps(record)
            print(line, file=file, flush=True)
            records.append(json.loads(line))  # as `--read` will find it
    print(report(records))


def read_text(path: Path) -> str:
    """Return the text of a file, which may be packed."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def with_progress(stage: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and say on stderr before each which it is and how long the rest of the stage takes."""
    began = time.perf_counter()
    for done, item in enumerate(items):
        left = (time.perf_counter() - began) / done * (len(items) - done) / 60 if done else None
        rest = "" if left is None else f", about {left:.1f} minutes left"
        print(f"{stage}: {done + 1} of {len(items)}{rest}", file=sys.stderr, flush=True)
        yield item


def positive(text: str) -> int:
    """An option that is a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; allowed is a whole number at least 1")
    return int(text)


def existing_device(text: str) -> str:
    """An option that names a device of this machine: of several processes each has one of its own."""
    try:
        return str(own_device(text))
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None
