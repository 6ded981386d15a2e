"""What can be added to as a unit: the units of layers, and the heads of an attention of the user's own.

A head takes part in three layers at once (queries, keys, values) or in three places of one, and the module
around them often says how many there are. So an attention is found by what it says of its heads, and the
attributes that count them rise together with the layers. Whether it then still does what it did is tried like
everything else.

Not served: nn.MultiheadAttention and code that takes heads times their size for the width of its input, where
more heads of the same size have no place; and attention with fewer keys and values than queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from esper.growing.coupling import Part, makers_of
from esper.growing.units import Role, units_out

SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "dim_per_head", "d_head")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
KINDS = 3  # queries, keys and values


@dataclass(frozen=True)
class Heads:
    """The heads of one attention."""

    module: nn.Module  # that counts them
    count: int
    size: int  # units of a head in each of the three kinds
    widths: tuple[str, ...]  # attributes of the module that hold count times size
    apart: bool = True  # whether one layer makes first all queries, then all keys, then all values

    def parts(self, makers: Sequence[nn.Module], more: int) -> list[Part]:
        """What has to grow for so many more heads, but for what reads them."""
        units = more * self.size
        fused = len(makers) == 1
        found = makers_of(makers, units * (KINDS if fused else 1))
        if fused and self.apart:
            old = self.count * self.size  # new units stand behind the old ones of each kind
            starts = [kind * (old + units) + old for kind in range(KINDS)]
            where = torch.cat([start + torch.arange(units) for start in starts])  # [3 units]
            found = [replace(part, where=where.to(next(makers[0].parameters()).device)) for part in found]
        named = [(name, more) for name in COUNTS if vars(self.module).get(name) == self.count]
        counts = (*named, *((name, units) for name in self.widths))
        return [*found, Part(self.module, Role.COUNTER, -1, more, counts=counts)]


@dataclass(frozen=True)
class Units:
    """Units that grow together: of layers whose outputs meet, or the heads that layers make."""

    makers: tuple[nn.Module, ...]
    heads: Heads | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return units_out(self.makers[0]) if self.heads is None else self.heads.count

    def parts(self, more: int) -> list[Part]:
        """The layers that make so many more, and what counts them."""
        return makers_of(self.makers, more) if self.heads is None else self.heads.parts(self.makers, more)


def heads_in(module: nn.Module, layers: Sequence[nn.Module]) -> Iterator[Units]:
    """The ways in which a module may be an attention, to be tried one after the other.

    layers: those with units, in the order in which they ran. The first of the module's own makes all three
    kinds, or the first three make one each.
    """
    said = {name: value for name, value in vars(module).items() if type(value) is int and value > 0}
    size = next((said[name] for name in SIZES if name in said), None)
    count = next((said[name] for name in COUNTS if name in said), None)
    children = set(module.children())
    own = [layer for layer in layers if layer in children]
    if size is None and count is None:
        return
    for makers, kinds in ((tuple(own[:KINDS]), 1), (tuple(own[:1]), KINDS)):
        width, rest = divmod(units_out(makers[0]) if makers else 0, kinds)
        if len(makers) * kinds != KINDS or rest:
            continue
        heads, head = count or width // (size or width), size or width // (count or width)
        if heads * head != width:
            continue
        equal = [name for name, value in said.items() if value == width and name not in (*COUNTS, *SIZES)]
        inner = [name for name in equal if not any(word in name for word in ("emb", "hidden", "model"))]
        for widths in dict.fromkeys((tuple(inner), tuple(equal))):
            for apart in (True, False) if kinds == KINDS else (True,):
                yield Units(makers, Heads(module, heads, head, widths, apart))
