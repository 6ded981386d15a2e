"""Controllers that follow a script: the controls that a learned one is measured against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.lifecycle.actions import Actions, AlphaTarget, Head, Op, Style, Tempo, relevance
from esper.lifecycle.stages import Stage
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.utils.streams import Stream, random_uniform


def first_legal(candidates: dict[Op, Tensor], masks: ActionMasks, details: Tensor) -> Actions:
    """Return the first op that is legal on a slot where it is a candidate, there; WAIT if none is.

    candidates: in order of importance, the slots [N, S] bool for each op; details [N, heads]: the choices of
    the other heads, used where the op reads them.
    """
    chosen = slot = torch.zeros_like(details[:, Head.OP])  # WAIT is 0
    for op, where in reversed(candidates.items()):  # the most important one is the last to overwrite
        legal = where & masks.slot_by_op[:, op]  # [N, S]
        possible = legal.any(dim=1)
        chosen = torch.where(possible, int(op), chosen)
        slot = torch.where(possible, legal.int().argmax(dim=1), slot)
    return build_actions(chosen, slot, details)


def build_actions(op: Tensor, slot: Tensor, details: Tensor) -> Actions:
    """Join op and slot with the other heads' choices, 0 where the op reads none.  # [N], [N], [N, H]"""
    choices = details.clone()
    choices[:, Head.SLOT], choices[:, Head.OP] = slot, op
    return Actions(choices * relevance(op))


def planting_details(blueprint: Tensor, style: Style, tempo: Tempo) -> Tensor:
    """Return how a seed of this blueprint is planted; its target is full strength.  # [N] → [N, heads]"""
    details = torch.zeros(len(blueprint), len(Head), dtype=torch.long, device=blueprint.device)
    details[:, Head.BLUEPRINT] = blueprint
    details[:, Head.STYLE], details[:, Head.TEMPO] = int(style), int(tempo)
    details[:, Head.ALPHA_TARGET] = int(AlphaTarget.FULL)
    return details


def kth_legal(mask: Tensor, k: Tensor) -> Tensor:
    """Return the k-th legal choice of each row, counted round and round.  # mask [N, C] bool, k [N] → [N]"""
    rank = mask.cumsum(dim=1)  # 1, 2, ... at the legal ones
    wanted = k.remainder(rank[:, -1].clamp(min=1)) + 1
    return (mask & (rank == wanted.unsqueeze(1))).int().argmax(dim=1)


def any_legal(mask: Tensor, uniform: Tensor) -> Tensor:
    """Return a legal choice of each row, all alike.  # mask [N, C] bool, uniform [N] in [0, 1) → [N]"""
    count = mask.sum(dim=1)
    return kth_legal(mask, (uniform * count).long().minimum(count - 1))


class Static(Controller):
    """Never grows anything."""

    uses_metrics = False

    def begin(self, info: EpisodeInfo) -> None:
        self._waits = Actions.wait(info.num_members, info.device)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        return self._waits


class RandomLegal(Controller):
    """Germinates at a rate where it may; otherwise any other legal op, on any slot, in any way."""

    uses_metrics = True

    def __init__(self, germination_rate: float = 0.2):
        if not 0.0 <= germination_rate <= 1.0:
            raise ValueError(f"germination_rate is {germination_rate}; allowed is 0 to 1")
        self.germination_rate = germination_rate

    def begin(self, info: EpisodeInfo) -> None:
        """Start an episode; every draw derives from its members, seed and number."""
        self._info = info

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Draw an op, then a slot under it, then the other heads, all among what is legal."""
        info = self._info
        draws = random_uniform(info.seed, info.members, Stream.CONTROL, info.counter(step), len(Head) + 1)
        others = masks.op.clone()
        others[:, Op.GERMINATE] = False
        germinates = masks.op[:, Op.GERMINATE] & (draws[:, -1] < self.germination_rate)
        op = torch.where(germinates, int(Op.GERMINATE), any_legal(others, draws[:, Head.OP]))
        slots = masks.slot_by_op.gather(1, op.view(-1, 1, 1).expand(-1, 1, masks.slot.shape[1])).squeeze(1)
        details = [any_legal(masks.head(head), draws[:, head]) for head in Head]
        return build_actions(op, any_legal(slots, draws[:, Head.SLOT]), torch.stack(details, dim=1))


# When the heuristic grows and when it gives up: chosen by hand on episodes of 30 steps.
PLATEAU_POINTS = 1.0  # an epoch that gains fewer points of accuracy made no progress
FIRST_EPOCH = 2  # never germinate before this many epochs
FOSSILISE_POINTS = 0.5  # fossilise a seed whose contribution is above this many points
PRUNE_POINTS = -2.0  # prune any seed whose contribution is this many points or less
REST_EPOCHS = 5  # no germination for this long after a prune


class Heuristic(Controller):
    """Germinates on a plateau, advances as the gates allow, keeps what helps and prunes what hurts.

    A seed at full strength (HOLDING) is pruned as soon as its contribution is negative; one that is still
    being blended in gets the benefit of the doubt down to PRUNE_POINTS. What a gate would refuse is not legal
    in the masks of an environment, so that no gate is asked here.
    """

    uses_metrics = True

    def begin(self, info: EpisodeInfo) -> None:
        """Start an episode in which no member has planted or pruned anything yet."""
        self._planted = torch.zeros_like(info.members)  # [N] seeds so far
        self._rested = torch.zeros_like(info.members)  # [N] the step from which a seed may be planted

    def state_dict(self) -> dict[str, Tensor]:
        return {"planted": self._planted, "rested": self._rested}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._planted = state["planted"].to(self._planted.device)
        self._rested = state["rested"].to(self._rested.device)

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        """Prune what hurts, else fossilise, else advance, else plant on a plateau, else wait."""
        contribution = observation.evidence.contribution
        holding = observation.slots.stage == Stage.HOLDING
        hurts = (contribution <= PRUNE_POINTS) | (holding & (contribution < 0))
        gain = observation.accuracy_history[:, -1] - observation.accuracy_history[:, -2]  # NaN at first
        on_plateau = gain < PLATEAU_POINTS / 100.0  # [N]
        ready = on_plateau & (self._rested <= step) & (step >= FIRST_EPOCH)
        candidates = {
            Op.PRUNE: hurts,
            Op.FOSSILIZE: contribution > FOSSILISE_POINTS,
            Op.ADVANCE: torch.ones_like(hurts),
            Op.GERMINATE: ready.unsqueeze(1).expand_as(hurts),
        }
        actions = self.act(candidates, masks)
        self._rested = torch.where(actions[Head.OP] == Op.PRUNE, step + REST_EPOCHS, self._rested)
        return actions

    def act(self, candidates: dict[Op, Tensor], masks: ActionMasks) -> Actions:
        """Return the first legal candidate; a seed gets the next of the legal blueprints."""
        blueprint = kth_legal(masks.blueprint, self._planted)
        details = planting_details(blueprint, Style.SIGMOID_ADD, Tempo.STANDARD)
        actions = first_legal(candidates, masks, details)
        self._planted = self._planted + (actions[Head.OP] == Op.GERMINATE)
        return actions
