"""A task of your own: `esper train --task examples/own_task.py:moons`."""

from __future__ import annotations

from sklearn.datasets import make_moons

from esper.tasks.task import HostSpec, Task, TaskEntry, as_split, build_task, random_splits

MOONS = TaskEntry(
    name="moons",
    topology="mlp",  # the kind of host: cnn, mlp or transformer
    input_shape=(2,),
    num_classes=2,
    sizes=(1000, 500, 500),  # samples to train on, to validate on, to test on
    host=HostSpec("resmlp", {"width": 32, "hidden": 8, "depth": 2}),
    description="Two half moons",
    scaling="feature",  # mean 0 and deviation 1, by the training split
)


def moons(seed: int) -> Task:
    points, labels = make_moons(2000, noise=0.2, random_state=seed)
    return build_task(MOONS, random_splits(as_split(points, labels), seed, validation=500, test=500))
