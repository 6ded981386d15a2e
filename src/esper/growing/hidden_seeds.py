"""A user's optimiser with seeds in it, saved and loaded as if they were not there.

What `optimiser.state_dict()` gives has the same form whatever has grown, so that it loads into a fresh
optimiser, before or after the seeds are planted again; the state of the seeds is for the `Grower` to save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

State = dict[str, Any]


def hide_seeds(optimiser: Optimizer, seeds: Callable[[], Collection[int]]) -> tuple[RemovableHandle, ...]:
    """Leave parameters out of what is saved, and put them back into what is loaded.

    seeds: gives the ids of those parameters. The handles take all this back.
    """
    return (
        optimiser.register_state_dict_post_hook(lambda rule, state: _without(rule, state, seeds())),
        optimiser.register_load_state_dict_pre_hook(lambda rule, state: _with(rule, state, seeds())),
    )


def _without(rule: Optimizer, state: State, seeds: Collection[int]) -> State:
    """A saved state, its parameters numbered anew."""
    groups, kept = [], dict[int, int]()  # from the old number to the new one
    for own, saved in zip(rule.param_groups, state["param_groups"], strict=True):
        pairs = zip(own["params"], saved["params"], strict=True)
        stay = [number for parameter, number in pairs if id(parameter) not in seeds]
        kept |= {number: len(kept) + k for k, number in enumerate(stay)}
        groups.append({**saved, "params": [kept[number] for number in stay]})
    states = {kept[number]: value for number, value in state["state"].items() if number in kept}
    return {**state, "state": states, "param_groups": groups}


def _with(rule: Optimizer, state: State, seeds: Collection[int]) -> State:
    """A state to be loaded, with what is remembered of the seeds now; as it is where it cannot fit."""
    own = [[p for p in group["params"] if id(p) not in seeds] for group in rule.param_groups]
    if [len(group) for group in own] != [len(group["params"]) for group in state["param_groups"]]:
        return state
    groups, states, count = [], dict[int, Any](), 0
    for group, saved in zip(rule.param_groups, state["param_groups"], strict=True):
        numbers = iter(saved["params"])
        for number, parameter in enumerate(group["params"], count):
            hidden = id(parameter) in seeds
            found = rule.state.get(parameter) if hidden else state["state"].get(next(numbers))
            if found:
                states[number] = found
        groups.append({**saved, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    return {**state, "state": states, "param_groups": groups}
