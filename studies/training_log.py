"""What the log of a training tells: how every agent fared, as a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from esper.foundation.errors import UserError
from esper.foundation.statistics import mean_interval
from esper.simic.rollout import Doubles
from studies.tables import interval, markdown
from studies.variants import MAIN

LOG = "train.jsonl"
PICTURE = "study_training.png"
LAST = 9  # rounds that the table is the mean of, three of each family


@dataclass(frozen=True)
class Agent:
    """One agent's rounds, in order."""

    name: str
    rows: list[dict[str, Any]]

    @property
    def is_main(self) -> bool:
        return self.name.startswith(f"{MAIN}-")

    def series(self, key: str) -> Doubles:
        """# [rounds]"""
        return np.array([row[key] for row in self.rows], dtype=np.float64)

    def over_families(self, key: str) -> Doubles:
        """The mean over a turn of all families: growth can earn more in some.  # [rounds − turn + 1]"""
        turn = len({row["family"] for row in self.rows})
        return np.convolve(self.series(key), np.full(turn, 1 / turn), mode="valid")


def read(path: Path) -> list[Agent]:
    """The agents of a log, in the order of their first lines."""
    agents: dict[str, Agent] = {}
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            agents.setdefault(row["agent"], Agent(row["agent"], [])).rows.append(row)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a log of a training ({error}); train again") from None
    return list(agents.values())


COLUMNS = {
    "return above the twin": ("above_twin", "+.4f"),
    "variance of V's target explained": ("explained_variance", ".2f"),
    "variance of the return explained by the baseline": ("explained_by_baseline", ".3f"),
    "entropy": ("entropy", ".2f"),
    "KL of an update": ("kl", ".3f"),
    "germinated": ("germinated", ".2f"),
    "pruned": ("pruned", ".2f"),
    "size / host": ("ratio", ".2f"),
}


def table(agents: Sequence[Agent]) -> str:
    """The mean of the last rounds, agent by agent."""
    rows = [
        [agent.name, *(format(agent.series(key)[-LAST:].mean(), form) for key, form in COLUMNS.values())]
        for agent in agents
    ]
    return markdown([f"agent (last {LAST} rounds)", *COLUMNS], rows)


def kinds_table(agents: Sequence[Agent], parts: int = 3) -> str:
    """Returns above the twin over parts of the training, and what V explains in the last of them.

    Intervals are 95 % over the trainings of a kind.
    """
    kinds: dict[str, list[Agent]] = {}
    for agent in agents:
        kinds.setdefault(agent.name.rpartition("-")[0], []).append(agent)
    rounds = min(len(agent.rows) for agent in agents)
    spans = [slice(*pair) for pair in pairwise(np.linspace(0, rounds, parts + 1).astype(int).tolist())]
    rows = [
        [
            name,
            str(len(several)),
            *(_over_trainings(several, "above_twin", span) for span in spans),
            _over_trainings(several, "explained_variance", spans[-1], ".2f"),
        ]
        for name, several in kinds.items()
    ]
    titles = [f"rounds {span.start + 1} to {span.stop}" for span in spans]
    return markdown(["controller", "trainings", *titles, "V explains, at last"], rows)


def _over_trainings(several: Sequence[Agent], key: str, span: slice, form: str = ".4f") -> str:
    return interval(*mean_interval([float(agent.series(key)[span].mean()) for agent in several]), form)


def picture(agents: Sequence[Agent], path: Path) -> None:
    """Returns above the twins, and what the baseline explains, round by round."""
    figure, (returns, baseline) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colours = plt.get_cmap("Dark2")
    others = [agent.name for agent in agents if not agent.is_main]
    for agent in agents:
        colour = "#d62728" if agent.is_main else colours(others.index(agent.name) % 8)
        label = agent.name if not agent.is_main or agent.name == f"{MAIN}-0" else None
        style = {"color": colour, "lw": 1.0, "alpha": 0.6 if agent.is_main else 1.0, "label": label}
        returns.plot(agent.over_families("above_twin"), **style)
        baseline.plot(agent.over_families("explained_by_baseline"), **style)
    returns.axhline(0, color="0.6", lw=0.8)
    returns.set(xlabel="round", ylabel="return above the ungrown twin", title="What is learned")
    baseline.set(xlabel="round", ylabel="share of variance", title="Returns, explained by the baseline")
    baseline.set_ylim(0, 1.02)
    returns.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
