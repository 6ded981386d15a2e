"""Grow into a model: `python -m examples.grow_into`.

A GPT of 8 layers learns Python's standard library. It trains with 4 layers first; the other 4 begin as copies
of trained ones. Beside it the whole model is trained plainly, for about the same training FLOPs.
"""

from __future__ import annotations

import torch

import esper
from examples.gpt import CONTEXT, make, make_loaders


def main(
    epochs: int = 4, samples: int | None = None, batch_size: int = 64, out: str | None = None
) -> esper.Grown:
    """Train grown and plainly and print the report; few epochs and samples make a quick trial."""
    # Yours: a model, or a function that makes one, and loaders of batches.
    model = make()
    train, val = make_loaders(batch_size, samples)

    tokens = epochs * len(train) * batch_size * CONTEXT
    print(esper.estimate(model, tokens=tokens))

    grown = esper.grow(
        model,
        train=train,
        val=val,
        controller="into",  # grow also where esper.estimate advises against it
        epochs=epochs,
        equal_compute=True,  # spend what growth saves on more epochs
        baseline=True,  # train the whole model plainly as well, for about the same training FLOPs
        out=out,  # a folder that 'esper watch', 'esper report' and 'esper export' read
        lr=3e-3,
    )
    print(grown.report())
    network = grown.model  # the class that you gave, with all of its blocks
    torch.save(network.state_dict(), "gpt.pt")  # into the current folder
    return grown


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
