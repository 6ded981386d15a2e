"""Grow into a model on several processes: `torchrun --nproc-per-node=2 -m examples.ddp`.

Blocks that are skipped have no gradients, so DistributedDataParallel is told to look for unused parameters.
Every process activates the same blocks at the same step, and their weights stay equal.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import esper
from examples.gpt import make, make_loaders


def main(epochs: int = 2, samples: int | None = None) -> None:
    """Train on every process that torchrun started, and check that all end with the same weights."""
    dist.init_process_group("gloo")  # "nccl" on GPUs, with the model on cuda:LOCAL_RANK
    train(epochs, samples)  # where the model ends with it: one that outlives its process group can hang
    dist.destroy_process_group()


def train(epochs: int, samples: int | None) -> None:
    dataset = make_loaders(samples=samples)[0].dataset
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset), drop_last=True)

    model = DistributedDataParallel(make(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    grower = esper.Progressive(model, optimizer, total_steps=epochs * len(loader))

    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.step()

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(weights, first), "the processes have other weights"
    if dist.get_rank() == 0:
        print(f"{grower.active} blocks active on {dist.get_world_size()} processes, equal weights")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(samples=int(os.environ.get("SAMPLES", 8192)))
