"""Train a controller on a population and compare it: `python -m examples.train_controller`.

The same as 'esper train' and 'esper compare', for a program of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from esper.comparing import as_comparison, compare, prepare
from esper.config import load_config
from esper.controllers import Fixed, load_controller
from esper.runs.schema import Comparison
from esper.training import TrainingRun


def main(out: str = "runs/controller", settings: Sequence[str] = ()) -> Comparison:
    """Train, then run the trained controller and networks that never grow on the same members."""
    config = load_config(preset="demo", overrides=list(settings))
    run = TrainingRun.start(config, Path(out))
    with run.folder:
        run.run(show=lambda round: print(f"round {round.round}: return {round.return_mean:+.4f}"))

    arms = {"static": Fixed(), "trained": load_controller(out)}
    environment, arms, remarks = prepare(config, arms)
    comparison = as_comparison(environment, compare(environment, arms), remarks)
    for difference in comparison.differences:
        if difference.quantity == "test_accuracy":
            gain, half = 100 * difference.mean, 100 * difference.ci
            print(f"{difference.controller} minus {difference.baseline}: {gain:+.2f} ± {half:.2f} points")
    return comparison


if __name__ == "__main__":
    main()
