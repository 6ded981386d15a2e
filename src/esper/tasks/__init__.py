"""Data sets that need no network access, each with a host that is deliberately too small for it."""

from esper.tasks import images, synthetic, tables, text  # noqa: F401  (each registers its tasks)
from esper.tasks.task import HostSpec, Split, Task, load_task, task_names, task_table

__all__ = ["HostSpec", "Split", "Task", "load_task", "task_names", "task_table"]
