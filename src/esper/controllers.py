"""Controllers by name, run folder or checkpoint, their conditions, and the arms of a comparison."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from esper.builders import LEARNER, agent_schema, make_agent
from esper.config import HostConfig, RunConfig
from esper.lifecycle.actions import Blueprint
from esper.population.forms import HALVES
from esper.population.hosts import HOST_PRESETS
from esper.runs.checkpoints import Checkpoint, CheckpointError, CheckpointStore, load_checkpoint
from esper.runs.run_folder import RunFolder
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.tamiyo.config import STUDY, Conditions, differences
from esper.tamiyo.controller import Controller
from esper.tamiyo.rates import ReactiveRate
from esper.tamiyo.schedule import BY_BUDGET, Schedule
from esper.tamiyo.scripted import Heuristic, RandomLegal, Static
from esper.utils.calls import call_function
from esper.utils.devices import own_device
from esper.utils.errors import UserError
from esper.utils.rows import strip_prefix
from esper.utils.settings import build

PRETRAINED, RATES = "tamiyo", "rates"  # controllers of growth and of the learning rate that ship with esper
INTO = "into"  # in `esper.grow`, in place of a controller
SHIPPED = Path(__file__).parent / "pretrained"
SIZE_OPTIONS = ("width", "hidden", "depth", "stages", "heads", "expansion")  # of a host
AGENT_SETTINGS = ("seed", "policy", "ppo", "learner", "episode")  # what a trained controller is made from
GREEDY = ":greedy"
FIXED = "fixed:"  # in a comparison: a host of another size that never grows


class Script(NamedTuple):
    """A scripted controller: how to make it, plain or from the text after a colon, and its description."""

    plain: Callable[[], Controller]
    meaning: str
    parse: Callable[[str], Controller] | None = None
    argument: str = ""  # what comes after the colon


SCRIPTED: dict[str, Script] = {
    "static": Script(Static, "never grows anything"),
    "random": Script(
        RandomLegal,
        "germinates at a rate where it may, and takes any other legal action otherwise",
        lambda text: RandomLegal(float(text)),
        "a germination rate, as in random:0.1",
    ),
    "heuristic": Script(Heuristic, "germinates on a plateau, keeps what helps and prunes what hurts"),
    "reactive": Script(
        ReactiveRate,
        "with episode.rates: doubles the learning rate where the validation loss falls slowly, halves it "
        "where the loss rises, and never grows anything",
        lambda text: ReactiveRate(float(text)),
        "the share by which the loss must fall in an epoch, as in reactive:0.05",
    ),
    "schedule": Script(
        lambda: Schedule(BY_BUDGET, STUDY),
        "grows by the share of the budget that is spent and keeps all: nothing if that pays the first host "
        "fewer than 384 minibatches, widens at 10 % below 1,536, else widens at 5 % and clones at 20 %; "
        "nothing outside of the conditions of docs/study.md",
        Schedule.parse,
        "lines as in schedule:clone@0.1+widen_full@0.3+clone@0.5x2",
    ),
}
CONTROLLER_NAMES = (PRETRAINED, RATES, *SCRIPTED)


def describe() -> list[tuple[str, str]]:
    """List everything that can be given as a controller, and what each is."""
    scripted = {
        name: f"{script.meaning}; after a colon: {script.argument}" if script.argument else script.meaning
        for name, script in SCRIPTED.items()
    }
    return [
        (PRETRAINED, "the trained controller of growth that ships with esper; it samples its choices"),
        (f"{PRETRAINED}{GREEDY}", "the same, taking its likeliest choices; works for any trained one"),
        (RATES, "with episode.rates: the trained controller of the learning rate that ships with esper"),
        *scripted.items(),
        ("a run folder", "the controller that the run trained, as its last checkpoint has it"),
        ("a checkpoint", "the controller in that file"),
        ("MODULE:FUNCTION", "one of your own, which the function or class returns when it is called"),
        (
            f"{FIXED}OPTIONS (compare)",
            f"a host of another size that never grows, at equal FLOPs, as in {FIXED}hidden=16+depth=2",
        ),
        (f"{INTO} (esper.grow)", "grow into the model also where that is not expected to pay"),
        ("an object (esper.grow)", "anything with begin(info) and decide(observation, masks, step)"),
    ]


def allowed_names() -> str:
    """Return what can be given as a controller, for an error message."""
    return f"allowed are {', '.join(name for name, _ in describe())}; 'esper controllers' describes them"


def load_controller(name_or_path: str, device: torch.device | str = "cpu") -> Controller:
    """Load a controller by its name, by the folder of the run that trained it, or from a checkpoint.

    'tamiyo' and 'rates' ship with esper. A trained controller samples its choices as it did when it was
    trained; 'rates', and any with ':greedy' after its name, takes the likeliest. MODULE:FUNCTION makes one of
    the user's own. Raises UserError for an unknown name.
    """
    if name_or_path.startswith(FIXED):
        raise UserError(f"controller is {name_or_path!r}; that is an arm of 'esper compare' alone")
    if name_or_path == INTO:
        raise UserError(f"controller is {INTO!r}; that is for a model of your own: esper.grow in Python")
    name, _, text = name_or_path.partition(":")
    if name not in SCRIPTED:
        plain = name_or_path.removesuffix(GREEDY)
        if text and plain == name_or_path and not Path(plain).exists():
            try:
                made = call_function("controller", plain)
            except UserError as error:
                raise UserError(f"{error}; {allowed_names()}") from error
            return make_controller(made, torch.device("cpu"))
        return load_learned(find_checkpoint(plain), device, plain != name_or_path or plain == RATES)
    script = SCRIPTED[name]
    if not text:
        return script.plain()
    if script.parse is None:
        raise UserError(f"controller is {name_or_path!r}; {name} takes nothing after a colon")
    try:
        return script.parse(text)
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"controller is {name_or_path!r}; after the colon: {script.argument} ({error})"
        ) from None


def make_controller(given: str | Controller, device: torch.device) -> Controller:
    """Load a controller by name, run folder or checkpoint, or check and return a given object."""
    if isinstance(given, str):
        return load_controller(given, device)
    missing = [name for name in ("begin", "decide") if not callable(getattr(given, name, None))]
    if missing:
        raise UserError(f"controller {type(given).__name__} lacks {' and '.join(missing)}; {allowed_names()}")
    return given


def find_checkpoint(name_or_path: str) -> Path:
    """Return the file of a trained controller: in the package, in a run folder, or the file itself."""
    path = Path(name_or_path)
    if name_or_path in (PRETRAINED, RATES):
        return SHIPPED / f"{name_or_path}.safetensors"
    if path.is_dir() and name_or_path:
        return CheckpointStore(RunFolder.read(path).checkpoints_path).last
    if path.is_file():
        return path
    near = difflib.get_close_matches(name_or_path.lower(), (*CONTROLLER_NAMES, INTO), n=1)
    hint = f"did you mean {near[0]!r}? " if near and near[0] != name_or_path else ""
    raise UserError(f"controller is {name_or_path!r}; {hint}{allowed_names()}")


def load_learned(
    path: Path, device: torch.device | str = "cpu", deterministic: bool = False
) -> LearnedController:
    """Load the controller of a checkpoint, with the settings that it was trained with.

    Raises UserError where there is no file, CheckpointError where it is damaged or of another version.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: the run is none of 'esper train', or has finished no round")
    checkpoint = load_checkpoint(path, (agent_schema(), agent_schema(rates=True)))
    agent = make_agent(checkpoint_config(checkpoint, path, AGENT_SETTINGS), torch.device(device))
    try:
        learned = strip_prefix(LEARNER, checkpoint.tensors)
        agent.policy.load_state_dict(strip_prefix("policy", learned))
        agent.value_normalizer.load_state_dict(strip_prefix("value_normalizer", learned))
        conditions = Conditions.model_validate(checkpoint.record["conditions"])
    except (KeyError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not hold the agent that its settings describe: {error}") from None
    return LearnedController(agent, deterministic, conditions)


def checkpoint_config(checkpoint: Checkpoint, path: Path, only: Sequence[str] = ()) -> RunConfig:
    """Return the settings of the run that wrote a checkpoint: all, or `only` some and defaults otherwise."""
    config = checkpoint.record.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no settings of a run; give a checkpoint of 'esper train'")
    try:
        return build(RunConfig, {key: config[key] for key in only or config if key in config})
    except UserError as error:
        raise CheckpointError(f"{path} was written by another version of esper: {error}") from None


# ---- the conditions that a controller was trained in -----------------------------------------------------


def conditions_of(specs: Sequence[EnvironmentSpec]) -> Conditions:
    """Return the conditions that these environments have together."""
    hosts: dict[str, dict[str, tuple[float, float]]] = {}
    minibatches: list[float] = []
    for spec in specs:
        kind, sizes = _host_of(spec)
        known = hosts.setdefault(kind, {})
        known |= {name: _range([size, *known.get(name, ())]) for name, size in sizes.items()}
        budget: float = spec.episode.steps * spec.population.batches_per_epoch
        if spec.episode.flops is not None:
            # One member on the CPU: FLOPs depend on the host alone, and counting them needs no GPU.
            alone = replace(spec, members=torch.zeros(1, dtype=torch.long), device="cpu", rate_scale=())
            minibatch = GrowthEnvironment(alone).bare_cost / spec.population.batches_per_epoch
            budget = spec.episode.flops / minibatch
        minibatches += [share * budget for share in spec.budgets]
    return Conditions(
        clock=specs[0].episode.clock,
        minibatches=_range(minibatches),
        batch_size=_range([spec.population.batch_size for spec in specs]),
        # The least and the largest rate that a member may begin with.
        learning_rate=_range(
            [spec.population.host_lr * spec.episode.rate_span**end for spec in specs for end in (-0.5, 0.5)]
        ),
        schedules=tuple(sorted({spec.population.schedule for spec in specs})),
        hosts=hosts,
        blueprints=tuple(sorted(specs[0].lifecycle.block_blueprints)),
        rates=specs[0].episode.rates,
        optimizer=specs[0].population.optimizer,
        seed_rate=_range([spec.population.seed_lr / spec.population.host_lr for spec in specs]),
    )


def _host_of(spec: EnvironmentSpec) -> tuple[str, dict[str, int]]:
    """Return the kind of a host and the options that decide its size; a user's own model has no kind."""
    host = spec.task.host
    if spec.make_host is not None or host.preset not in HOST_PRESETS:
        return "a model of your own", {}
    # Options that a task leaves out have the default of the function that builds the host.
    taken = inspect.signature(HOST_PRESETS[host.preset]).parameters
    options = {name: taken[name].default for name in SIZE_OPTIONS if name in taken}
    options |= host.options
    sizes = {name: int(options[name]) for name in SIZE_OPTIONS if name in options}
    if host.preset == "resnet":
        sizes["hidden"] = sizes["hidden"] or sizes["width"]  # 0 is as many as the width
    return host.preset, sizes


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def check_schedule(arm: Arm, environment: GrowthEnvironment) -> None:
    """Raise UserError for a schedule that asks for what slots can never take.

    A slot takes the blueprints that fit it: `population.folds` seeds that become part of the host, and one
    that stays in it. Its block is widened to at most `population.widest` times its units.
    """
    config, fits = environment.spec.population, environment.population.growable()[0].cpu()
    updates = environment.steps * environment.population.batches
    needs = torch.zeros(2, environment.num_slots, dtype=torch.long)  # seeds, and widenings by half
    events = arm.events if isinstance(arm, Schedule) else []
    for line in (e for e in events if e.updates[0] <= updates < e.updates[1]):
        slots = [s for s in range(len(fits)) if fits[s, line.blueprint] and s in (line.slots or (s,))]
        if not slots:
            known = ", ".join(b.name for b in Blueprint if fits[:, b].any())
            raise UserError(
                f"the schedule plants {line.blueprint.name.lower()}, which fits none of its slots; this host "
                f"takes {known.lower()}"
            )
        needs[:, slots] += line.times * torch.tensor([[1], [HALVES.get(line.blueprint, 0)]])
    seeds, halves = needs.amax(1).tolist()
    for what, setting, asked, most in (
        (f"{seeds:,} seeds in a slot", "folds", seeds - 1, config.folds),
        (f"blocks of {1 + halves / 2:g} times their units", "widest", 1 + -(-halves // 2), config.widest),
    ):
        if asked > most:
            raise UserError(
                f"the schedule asks for {what}, more than population.{setting}={most} allows; ask for less, "
                f"or set population.{setting}={asked}"
            )


# ---- the arms of a comparison, from their names ----------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """An arm of networks that never change."""

    host: Mapping[str, int] = field(default_factory=dict)  # options of the host that are other than its own


Arm = Controller | Fixed


def arms_that_may_grow(arms: Mapping[str, Arm], spec: EnvironmentSpec) -> tuple[dict[str, Arm], list[str]]:
    """Replace controllers outside of their conditions by networks that never grow; return remarks on them."""
    allowed, remarks = dict(arms), list[str]()
    for name, arm in arms.items():
        trained = getattr(arm, "conditions", None)  # a user's own controller may have none
        found = differences(trained, conditions_of([spec])) if trained is not None else []
        if found:
            allowed[name] = Fixed()
            remarks.append(
                f"{name} does not act here, because it is outside the conditions that it was trained in: "
                f"{', '.join(found)}; shipped ones act with --preset compute (rates: demo), all with --force"
            )
    return allowed, remarks


def arms_of(text: str, config: RunConfig) -> dict[str, Arm]:
    """Parse 'static,heuristic,fixed:hidden=16,runs/mine' into arms by name; the first one is the baseline.

    Raises UserError where nothing is named, something is named twice, or a controller cannot be loaded.
    """
    named = [part.strip() for part in text.split(",")]
    if not all(named):
        raise UserError(f"--controllers is {text!r}; give one comma between two of them; {allowed_names()}")
    twice = sorted({part for part in named if named.count(part) > 1})
    if twice:
        raise UserError(f"--controllers names {', '.join(twice)} more than once; name each arm once")
    arms: dict[str, Arm] = {}
    for name in named:
        if name.startswith(FIXED):
            arms[name] = _parse_fixed(name)
        else:
            loaded = load_controller(name, own_device(config.device))
            # Static is trained as a fixed arm, which gets the FLOPs that growth spent.
            arms[name] = Fixed() if isinstance(loaded, Static) else loaded
    return arms


def _parse_fixed(name: str) -> Fixed:
    """Parse 'fixed:hidden=16+depth=2'; raise UserError for anything else."""
    pairs = [part.partition("=") for part in name.removeprefix(FIXED).split("+")]
    options = {option: int(value) for option, _, value in pairs if option and value.isdecimal()}
    if len(options) < len(pairs):
        raise UserError(
            f"controller is {name!r}; after the colon: options of the host, each once, as in "
            f"{FIXED}hidden=16+depth=2"
        )
    try:
        return Fixed(host=build(HostConfig, options).options())
    except UserError as error:
        raise UserError(f"controller is {name!r}, and {error}") from None
