"""Grow into a model in a training loop of your own: `python -m examples.own_loop`.

`esper.Progressive` is told of every optimizer step and activates the skipped blocks when it is time. Its
state goes into the checkpoint beside those of the model and the optimizer.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

import esper
from examples.gpt import make, make_loaders


def main(epochs: int = 3, samples: int | None = None, checkpoint: Path = Path("own_loop.pt")) -> float:
    """Train from scratch, or from the checkpoint if there is one; return the last training loss."""
    model = make()
    loader, _ = make_loaders(samples=samples)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    grower = esper.Progressive(model, optimizer, total_steps=epochs * len(loader))

    begun = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        grower.load_state_dict(saved["grower"])
        begun = saved["epoch"]
        if begun >= epochs:
            print(f"{checkpoint} holds all {epochs} epochs; delete it to begin anew")

    print(f"{grower.active} of {grower.blocks} blocks active")
    loss = torch.tensor(float("nan"))
    for epoch in range(begun, epochs):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if grower.step():
                print(f"step {grower.steps_done}: all {grower.blocks} blocks from here on")
        print(f"epoch {epoch + 1}: {grower.active} blocks active, loss {loss:.3f}")
        states = {"model": model, "optimizer": optimizer, "grower": grower}
        torch.save(
            {name: each.state_dict() for name, each in states.items()} | {"epoch": epoch + 1}, checkpoint
        )
    return loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
