"""Data sets that need no network, each with a host that is deliberately too small for it."""

from esper.tasks import images, signals, spirals, synthetic, tables, text, variants
from esper.tasks.registry import (
    Splits,
    TaskEntry,
    build_task,
    load_task,
    random_splits,
    register,
    task_names,
    task_table,
)
from esper.tasks.synthetic import synthetic_task
from esper.tasks.task import HostSpec, Split, Task, TestSplit

__all__ = [
    "HostSpec",
    "Split",
    "Splits",
    "Task",
    "TaskEntry",
    "TestSplit",
    "build_task",
    "images",
    "load_task",
    "random_splits",
    "register",
    "signals",
    "spirals",
    "synthetic",
    "synthetic_task",
    "tables",
    "task_names",
    "task_table",
    "text",
    "variants",
]
