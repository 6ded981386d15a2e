"""Grow into the module of a Lightning Trainer: `python -m examples.lightning_trainer`.

Needs the extra: pip install 'esper-lite[lightning]'
"""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor

import esper
from examples.gpt import make, make_loaders


class Module(lightning.LightningModule):
    """An ordinary module; nothing in it knows of growth."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(epochs: int = 3, samples: int | None = None) -> esper.Progressive:
    """Train; return the object that grew the model."""
    loader, _ = make_loaders(samples=samples)

    growth = esper.LightningProgressive()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[growth],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader)

    assert growth.grower is not None
    print(f"{growth.grower.active} blocks active after {growth.grower.steps_done} steps")
    return growth.grower


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
