"""How this process was started: alone, or as one of several by torchrun. Needs no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from esper.utils.errors import UserError


@dataclass(frozen=True)
class Launch:
    """What torchrun tells each of its processes; the defaults are those of a process that stands alone."""

    rank: int = 0  # among all processes
    size: int = 1
    local_rank: int = 0  # among those of this machine
    restarts: int = 0  # how often torchrun has started everything again
    may_restart: int = 0  # how often it would

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Launch:
        """As the environment variables say; raises UserError where one is not a number."""
        names = {
            "rank": "RANK",
            "size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "restarts": "TORCHELASTIC_RESTART_COUNT",
            "may_restart": "TORCHELASTIC_MAX_RESTARTS",
        }
        values = {field: environment[name] for field, name in names.items() if name in environment}
        strange = [names[field] for field, value in values.items() if not value.isdigit()]
        if strange:
            raise UserError(
                f"{strange[0]} is {environment[strange[0]]!r} in the environment; torchrun sets it to a "
                "number: start with torchrun, or unset it"
            )
        return Launch(**{field: int(value) for field, value in values.items()})

    @property
    def speaks(self) -> bool:
        """Whether this process tells what is wrong with an input that all of its machine were given."""
        return self.local_rank == 0

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size} on {socket.gethostname()}"
