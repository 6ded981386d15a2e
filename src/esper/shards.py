"""The members of a comparison in one environment or in several, in this process and in others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch

from esper.builders import make_environment
from esper.config import RunConfig
from esper.lifecycle.slot_states import SlotStates
from esper.simic.environment import GrowthEnvironment
from esper.simic.episode_record import EpisodeRecord
from esper.simic.rollout import TestResult
from esper.utils.devices import own_device
from esper.utils.gather import Alone, Gather, gather_pieces, held_shards
from esper.utils.rows import under_prefix, with_prefix


class Shards:
    """The members of a comparison, in the environments that this process holds and in those of others.

    What is measured comes from all of them, in the order of the members. One environment is one shard.
    """

    def __init__(
        self, held: Sequence[GrowthEnvironment], ranges: Sequence[range], members: int, gather: Gather
    ) -> None:
        """ranges: which of the `members` each environment has, by their place among all."""
        self.held, self.ranges, self.members, self.gather = held, ranges, members, gather

    @classmethod
    def of(cls, environment: GrowthEnvironment | Self) -> Self:
        """The environment alone, or the shards as they are."""
        if not isinstance(environment, GrowthEnvironment):
            return environment
        members = environment.num_members
        return cls([environment], [range(members)], members, Alone())

    @classmethod
    def made(cls, config: RunConfig, gather: Gather) -> Self:
        """Those that this process holds; raises UserError where there are too few members or shards."""
        shards, device = config.shards or 1, own_device(config.device)
        ranges = held_shards(config.members, shards, gather)
        held = [make_environment(config, device, torch.arange(r.start, r.stop)) for r in ranges]
        return cls(held, ranges, config.members, gather)

    @property
    def first(self) -> GrowthEnvironment:
        """One of them, for all that they have in common."""
        return self.held[0]

    def remade(self, **changes: object) -> Self:
        """Fresh environments of the same members with other settings."""
        held = [type(e)(replace(e.spec, **changes)) for e in self.held]  # type: ignore[arg-type]
        return type(self)(held, self.ranges, self.members, self.gather)

    def slots(self, slots: SlotStates | None) -> list[SlotStates | None]:
        """The slots of each environment, of those of all members."""
        return [None if slots is None else slots[slice(r.start, r.stop)] for r in self.ranges]

    def joined(self, played: Sequence[tuple[EpisodeRecord, TestResult]]) -> tuple[EpisodeRecord, TestResult]:
        """What all members did and reached, from what each environment of this process had."""
        record, test = played[0]
        if record.num_members == self.members:
            return record, test
        pieces = [
            with_prefix("record", record.tensors())
            | with_prefix("test", {n: torch.from_numpy(v) for n, v in vars(test).items()})
            for record, test in played
        ]
        everyone = gather_pieces(self.gather, pieces)
        reached = [under_prefix("test", piece) for piece in everyone]
        whole = {name: torch.cat([each[name] for each in reached]).numpy() for name in vars(test)}
        return record.side_by_side([under_prefix("record", piece) for piece in everyone]), TestResult(**whole)
