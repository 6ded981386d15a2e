"""First weights of hosts and seeds: made when they are first needed, a function of the run's seed alone."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import Blueprint
from esper.population.bodies import Bodies
from esper.population.plan import Ints, ship

SEED_BYTES = 1 << 28  # first weights of one blueprint at one kind of slot take at most this much
HOST_BYTES = 1 << 30  # first hosts that take more in sum are made anew for every episode


class HostBank:
    """First weights of hosts, by number; they are kept for later episodes while they take little memory."""

    def __init__(self, bodies: Bodies, seed: int) -> None:
        self.bodies, self.seed = bodies, seed
        self._forget()

    def _forget(self) -> None:
        bodies, blocks = self.bodies, len(self.bodies.slots) if self.bodies.has_blocks else 0
        self._place: dict[int, int] = {}  # number of a host → its row
        self._hosts = torch.zeros(0, bodies.host_width, device=bodies.device)
        self._blocks = torch.zeros(0, blocks, bodies.part_width, device=bodies.device)

    def rows(self, picks: Tensor) -> tuple[Tensor, Tensor]:
        """The hosts with these numbers, which lie on the CPU, and their blocks, if they have any.

        # [N] → [N, P], [N, S or 0, part_width]
        """
        wanted: list[int] = picks.tolist()
        new = sorted(set(wanted) - self._place.keys())
        if new:
            made = [self.bodies.initial_host(hash((self.seed, pick)) & 0x7FFFFFFF) for pick in new]
            self._place |= {pick: len(self._hosts) + k for k, pick in enumerate(new)}
            hosts, blocks = torch.stack([h for h, _ in made]), torch.stack([b for _, b in made])
            self._hosts = torch.cat([self._hosts, hosts.to(self._hosts)])
            kept = blocks[:, : self._blocks.shape[1]]
            self._blocks = torch.cat([self._blocks, kept.to(self._blocks)])
        at = ship(np.array([self._place[pick] for pick in wanted]), self._hosts.device)
        found = self._hosts[at], self._blocks[at]
        if self._hosts.nbytes + self._blocks.nbytes > HOST_BYTES:
            self._forget()
        return found


class SeedBank:
    """First weights of fresh seeds: a few draws of a blueprint at a kind of slot, made when first needed."""

    def __init__(self, bodies: Bodies, seed: int, draws: int) -> None:
        self.bodies, self.seed, self._most = bodies, seed, draws
        self._rows = torch.zeros(0, bodies.part_width, device=bodies.device)
        self._kinds = np.array([bodies.slots.index(forms) for forms in bodies.slots])  # first slots of a kind
        self._first = np.full((len(bodies.slots), len(Blueprint)), -1)  # by kind: the first draw of each

    @cached_property
    def draws(self) -> int:
        """How many there are of each blueprint at each kind of slot."""
        return max(1, min(self._most, SEED_BYTES // (4 * self.bodies.part_width)))

    def first(self, slot: Ints, blueprint: Ints) -> Ints:
        """Where the draws of these seeds begin; those that nobody had before are made.  # [k] each → [k]"""
        kinds = self._kinds[slot]
        new = self._first[kinds, blueprint] < 0
        for kind, name in sorted(set(zip(kinds[new].tolist(), blueprint[new].tolist(), strict=True))):
            seeds = [hash((self.seed, kind, name, d)) & 0x7FFFFFFF for d in range(self.draws)]
            made = torch.stack([self.bodies.initial_seed(kind, Blueprint(name), s) for s in seeds])
            self._first[kind, name] = len(self._rows)
            self._rows = torch.cat([self._rows, made.to(self._rows)])
        found: Ints = self._first[kinds, blueprint]
        return found

    def rows(self, first: Tensor, picks: Tensor) -> Tensor:
        """The draws that `picks` fall on, from where each begins.  # [k] int64 each → [k, part_width]"""
        return self._rows[first + picks.remainder(self.draws)]
