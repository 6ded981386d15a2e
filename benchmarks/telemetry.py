"""`python -m benchmarks.telemetry`: what it costs to record a run, as a share of the run.

Counted as telemetry: recording every step of an episode and reading it back, events, films, metrics, the
checkpoint of every round and the live view. Thread CPU time on one thread; the bar is 3 % of a step.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from benchmarks.common import one_thread
from esper.config import load_config
from esper.foundation.interrupts import StopRequest
from esper.simic import rollout
from esper.telemetry.live import LiveView
from esper.training import TrainingRun

BAR = 0.03


class Meter:
    """Adds up the CPU and wall time that is spent inside the functions that it wraps."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*arguments: Any, **named: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.cpu += time.thread_time() - cpu
                self.wall += time.perf_counter() - wall
                self.calls += 1

        return metered


def measure(preset: str, overrides: list[str]) -> dict[str, float]:
    """Play a run with everything switched on and tell its parts apart."""
    config = load_config(preset=preset, overrides=overrides)
    record, keep, whole = Meter(), Meter(), Meter()
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun.start(config, Path(folder) / "run")
        run.trainer.play_round()  # first use fills caches
        run.trainer.rounds_done = 0
        console = Console(file=io.StringIO(), force_terminal=True, width=120, height=50)
        parts = {name: record.around(getattr(rollout, name)) for name in ("_seen", "_done", "_read")}
        with (
            patch.multiple(rollout, **parts),
            patch.object(run, "_keep", keep.around(run._keep)),
            LiveView(console, "benchmark", config.rounds) as view,
            run.folder,
        ):
            whole.around(run.run)(view, StopRequest())
    steps = config.rounds * config.episode.steps
    telemetry = record.cpu + keep.cpu
    return {
        "members": config.members,
        "steps": steps,
        "step_ms": 1e3 * (whole.cpu - telemetry) / steps,
        "recording_ms": 1e3 * record.cpu / steps,
        "round_ms": 1e3 * keep.cpu / config.rounds,
        "share": telemetry / (whole.cpu - telemetry),
        "wall_share": (record.wall + keep.wall) / (whole.wall - record.wall - keep.wall),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--preset", default="demo", help="the run to be measured")
    parser.add_argument("--set", action="append", default=["rounds=3"], dest="overrides", help="a setting")
    parser.add_argument("--json", action="store_true", help="one object instead of a sentence")
    given = parser.parse_args(arguments)
    with one_thread():
        found = measure(given.preset, given.overrides)
    if given.json:
        print(json.dumps(found))
        return
    print(
        f"{found['members']} members: a step takes {found['step_ms']:.1f} ms of CPU; recording it takes "
        f"{found['recording_ms']:.2f} ms, and writing a round {found['round_ms']:.1f} ms. Telemetry is "
        f"{found['share']:.2%} of the CPU time ({found['wall_share']:.2%} of the wall time); "
        f"the bar is {BAR:.0%}."
    )


if __name__ == "__main__":
    main()
