"""What a decision step asks of the host beside its replays, counted and timed on a CPU.

    python -m benchmarks.host_work --members 64
    python -m benchmarks.host_work --members 64 --clock compute      with compute as the budget

A replay runs its function again, and what runs inside is left out: it would be a GPU's work. `operations` are
those outside of replays, each a launch on a GPU, views not counted; `ms` is the time of this thread outside
of them, where an operation is a small computation instead of a launch. The work is that of `benchmarks.loop`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.loop import WORKS, make_trainer
from esper.foundation.replay import Captured, Copies, Replayed, Studio
from esper.population.replays import Replays
from esper.population.stepping import Crew
from esper.simic.trainer import Trainer
from studies.command_line import positive
from tests.replaying import tensors_in

_FREE = ("empty", "detach", "lift_fresh", "_unsafe_view")  # operations that launch nothing


class Host:
    """What ran outside of replays."""

    def __init__(self) -> None:
        self.inside, self.replays, self.away = False, 0, 0.0
        self.operations: Counter[str] = Counter()

    def clock(self) -> float:
        """Seconds of this thread outside of replays."""
        return time.thread_time() - self.away

    def replay(self, replayed: Replayed, *arguments: Tensor) -> Any:
        """As on a GPU: arguments are copied to their places, then the function runs."""
        if replayed.known and not replayed._places:
            replayed._places = tuple(value.clone() for value in arguments)
            replayed._copies = Copies(replayed._places, arguments)
        if replayed.known:
            replayed._copies(replayed._places, arguments)
        begun, outer = time.thread_time(), not self.inside
        self.inside = True
        found = replayed.function(*(replayed._places if replayed.known else arguments))
        if replayed.known and replayed._result is not None:
            for place, value in zip(tensors_in(replayed._result), tensors_in(found), strict=True):
                place.copy_(value)
        else:
            replayed._result = found if replayed.known else None
        result = found if replayed._result is None else replayed._result
        replayed.known = True
        if outer:
            self.inside, self.replays = False, self.replays + 1
            self.away += time.thread_time() - begun
        return result

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Meanwhile everything is captured that a GPU would capture."""
        capture, choose = Captured.__init__, Replays.__init__

        def captured(own: Captured[Any, Any], function: Any, studio: Studio | None) -> None:
            capture(own, function, studio or Studio())

        def chosen(own: Replays, crew: Crew) -> None:
            choose(own, crew)
            own.possible = True

        with (
            patch.object(Studio, "__init__", lambda studio: None),
            patch.object(Replayed, "__call__", lambda own, *arguments: self.replay(own, *arguments)),
            patch.object(Captured, "__init__", captured),
            patch.object(Replays, "__init__", chosen),
            patch.object(Replays, "release", lambda own: None),
        ):
            yield


class Count(TorchDispatchMode):
    """Counts the operations outside of replays."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not (self.host.inside or func.is_view or any(part in name for part in _FREE)):
            self.host.operations[name] += 1
        return func(*args, **(kwargs or {}))


def trainer_of(args: argparse.Namespace) -> Trainer:
    """That of `benchmarks.loop`, with the clock that was asked for."""
    trainer = make_trainer(args, args.members)
    spec = trainer.environment.spec
    episode = spec.episode.model_copy(update={"clock": args.clock})
    return Trainer([replace(spec, episode=episode)], list(trainer.learners.values()), rounds=trainer.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=positive, default=64)
    parser.add_argument("--steps", type=positive, default=5, help="decision steps in an episode")
    parser.add_argument("--rounds", type=positive, default=3, help="timed episodes")
    parser.add_argument("--warm", type=positive, default=6, help="episodes before them")
    parser.add_argument("--clock", choices=["steps", "compute"], default="steps")
    parser.add_argument("--work", choices=WORKS, default="images")
    args = parser.parse_args()
    args.chunk, args.precision, args.device = None, "float32", "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = Host()
    with host.replaying():
        trainer = trainer_of(args)
        for _ in range(args.warm):
            trainer.play_round()
        host.replays, begun = 0, host.clock()
        for _ in range(args.rounds):
            trainer.play_round()
        steps = args.rounds * args.steps
        print(f"{(host.clock() - begun) / steps * 1e3:.1f} ms a step, {host.replays / steps:.1f} replays")
        with Count(host):
            trainer.play_round()
    print(f"{sum(host.operations.values()) / args.steps:.0f} operations a step:")
    for name, count in host.operations.most_common(20):
        print(f"{count / args.steps:8.1f} {name}")


if __name__ == "__main__":
    main()
