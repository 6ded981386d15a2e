"""The cost of a round on 1 to 1,024 GPUs, by the formula of docs/scaling.md: `benchmarks.scaling --model`."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Model:
    """A round of P processes, by the formula of docs/scaling.md."""

    members: int = 2048  # of each process
    steps: int = 40
    epochs: int = 4
    minibatches: int = 4
    step_s: float = 0.050  # without the update: results/h200-loop-replays.jsonl, images
    update_s: float = 1.27e-6  # of one transition in one epoch: results/h200-update.jsonl
    sent: int = 1600  # bytes of one transition, with its record and that of its twin
    network: float = 1.1e9  # bytes per second between two machines
    gradient: float = 1.17e6  # bytes of one part's
    shared: bool = False  # ppo.virtual_shards is the number of processes, else 1

    def parts(self, size: int) -> tuple[float, float, float]:
        """Seconds of the episode, of the update with what travels in it, and of the exchange."""
        transitions = size * self.members * self.steps
        exchange = transitions * self.sent / self.network if size > 1 else 0.0
        update = transitions * self.epochs * self.update_s
        if self.shared and size > 1:
            update /= size
            update += self.epochs * self.minibatches * size * self.gradient / self.network
        return self.steps * self.step_s, update, exchange

    def worth(self, size: int) -> float:
        """How many GPUs would do as much in the same time if sharing cost nothing."""
        return size * sum(self.parts(1)) / sum(self.parts(size))


def show_model() -> None:
    """With the update whole in every process, and in as many parts as there are processes."""
    table = Table(title="A round by formula")
    columns = ("GPUs", "episode, s", "exchange, s", "gathered, GB")
    for title in (*columns, "update whole, s", "worth", "update in parts, s", "worth"):
        table.add_column(title, justify="right")
    for size in (1, 8, 64, 256, 1024):
        episode, _, exchange = Model().parts(size)
        held = size * Model.members * Model.steps * Model.sent / 1e9
        numbers = [episode, exchange, held]
        for model in (Model(), Model(shared=True)):
            numbers += [model.parts(size)[1], model.worth(size)]
        table.add_row(f"{size:,}", *(f"{number:.1f}" for number in numbers))
    Console(width=120).print(table)
