"""Grow a GPT by repeating its blocks: `python examples/grow_gpt.py`.

A small language model begins with two blocks; after three tenths of its training each is repeated, a copy
behind it, so that it ends with four. It is compared with the same model kept at two blocks, and with one of
four blocks from the start, all for the same training FLOPs, on text that none has seen.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import esper
from esper.foundation.statistics import mean_interval
from esper.growing.result import Grown
from esper.tasks import load_task
from examples.grow_transformer import LanguageModel

EPOCHS = 8
WIDTH = 32


def main(epochs: int = EPOCHS, seeds: int = 3, windows: int = 3072) -> dict[str, list[float]]:
    """Test losses of each way, seed by seed."""
    text = load_task("text")
    train = (text.train.inputs[:windows], text.train.targets[:windows])
    held = min(512, windows)
    val = (text.validation.inputs[:held], text.validation.targets[:held])
    test = text.test()

    def trained(depth: int, epochs: int, controller: str, seed: int, baseline: bool = False) -> Grown:
        torch.manual_seed(seed)
        model = LanguageModel(text.num_classes, text.input_shape[0], width=WIDTH, depth=depth)
        return esper.grow(
            model, train=train, val=val, slots=["blocks"], controller=controller, epochs=epochs, seed=seed,
            baseline=baseline, engine="live", lr=1e-2, batch_size=64, progress=False,
        )  # fmt: skip

    once = trained(4, 1, "static", 0).record.flops[0]
    losses: dict[str, list[float]] = {"2 blocks": [], "4 blocks": [], "grown 2 → 4": []}
    for seed in range(seeds):
        grown = trained(2, epochs, "schedule:clone@0.3", seed, baseline=True)
        deep = trained(4, max(1, math.ceil(grown.record.flops[0] / once)), "static", seed)
        assert grown.baseline is not None
        for name, run in zip(losses, (grown.baseline, deep, grown), strict=True):
            with torch.no_grad():
                outputs = run.model(test.inputs)
            losses[name].append(F.cross_entropy(outputs.flatten(0, 1), test.targets.flatten()).item())
    print(grown.report())
    print("\ntest loss for the same training FLOPs:")
    own = losses["grown 2 → 4"]
    for name, found in losses.items():
        mean, half = mean_interval([a - b for a, b in zip(own, found, strict=True)])
        told = "" if found is own else f"; grown against it {mean:+.3f} ± {half:.3f} (lower is better)"
        print(f"  {name}: {sum(found) / seeds:.3f}{told}")
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
