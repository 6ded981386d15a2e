"""Tiny settings for the tests of the study."""

from __future__ import annotations

from functools import cache

from esper.tasks import load_task
from esper.tasks.task import Task
from studies.setting import Setting

TINY = Setting(steps=12, batches=4)  # long enough to raise a seed that is planted in the third step
MEMBERS = 2


@cache
def task(name: str = "spirals") -> Task:
    return load_task(name)
