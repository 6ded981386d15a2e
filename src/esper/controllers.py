"""Controllers by name, trained ones by the run or the checkpoint that holds them, and who is compared."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from esper.builders import LEARNER, agent_schema, make_agent, make_specs
from esper.config import HostConfig, RunConfig, saved_config
from esper.population.hosts import HOST_PRESETS
from esper.runs.checkpoints import Checkpoint, CheckpointError, CheckpointStore, load_checkpoint
from esper.runs.run_folder import RunFolder
from esper.runs.schema import FINAL_OF
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.steps import EnvironmentSpec
from esper.tamiyo.config import STUDY, Conditions, differences
from esper.tamiyo.controller import Controller
from esper.tamiyo.schedule import BY_BUDGET, Schedule
from esper.tamiyo.scripted import Habit, Heuristic, RandomLegal, Static
from esper.utils.devices import own_device
from esper.utils.errors import UserError
from esper.utils.rows import under_prefix
from esper.utils.settings import build

PRETRAINED = "tamiyo"
SHIPPED = Path(__file__).parent / "pretrained"
SIZE_OPTIONS = ("width", "hidden", "depth", "stages", "heads", "expansion")  # of a host
AGENT_SETTINGS = ("seed", "policy", "ppo", "learner")  # what a trained controller is made from
GREEDY = ":greedy"
FINAL = "final:"  # in a comparison: the network that a controller ended with, from the start
BEST_OF = "best-of"  # in a comparison: the best of several networks that never grow
FIXED = "fixed:"  # in a comparison: a host of another size that never grows


@dataclass(frozen=True)
class Script:
    """How to make a scripted controller, plain or from the text after its colon."""

    plain: Callable[[], Controller]
    meaning: str
    from_text: Callable[[str], Controller] | None = None
    takes: str = ""  # what comes after the colon


SCRIPTED: dict[str, Script] = {
    "static": Script(Static, "never grows anything"),
    "random": Script(
        RandomLegal,
        "germinates at a rate where it may, and takes any other legal action otherwise",
        lambda text: RandomLegal(float(text)),
        "a germination rate, as in random:0.1",
    ),
    "heuristic": Script(
        Heuristic,
        "germinates on a plateau, keeps what helps and prunes what hurts",
    ),
    "habit": Script(
        Habit,
        "plants the strongest seed of the host's kind in every slot as soon as it may, and looks at nothing",
    ),
    "schedule": Script(
        lambda: Schedule(BY_BUDGET, STUDY),
        "grows by the share of the budget that is spent and keeps all: nothing if that pays the first host "
        "fewer than 384 minibatches, widens at 10 % below 1,536, else widens at 5 % and clones at 20 %; "
        "nothing outside of the conditions of docs/study.md",
        Schedule.parse,
        "lines as in schedule:clone@0.1+widen_full@0.3+clone@0.5x2, or a YAML file with a list of them",
    ),
}
CONTROLLER_NAMES = (PRETRAINED, *SCRIPTED)


def describe() -> list[tuple[str, str]]:
    """Everything that a controller can be called on the command line, and what each is."""
    scripted = {
        name: f"{script.meaning}; after a colon: {script.takes}" if script.takes else script.meaning
        for name, script in SCRIPTED.items()
    }
    return [
        (PRETRAINED, "the trained controller that ships with esper; it draws its choices"),
        (f"{PRETRAINED}{GREEDY}", "the same, taking its likeliest choices; works for any trained one"),
        *scripted.items(),
        ("a run folder", "the controller that the run trained, as its last checkpoint has it"),
        ("a checkpoint", "the controller in that file"),
        (
            f"{FINAL}NAME",
            "compare only: the network that NAME ended with, trained from the start for as many FLOPs",
        ),
        (
            BEST_OF,
            "compare only: the best on validation data of as many ungrown networks as growth's FLOPs buy; "
            f"after a colon: how many are to share them, as in {BEST_OF}:8",
        ),
        (
            f"{FIXED}OPTIONS",
            "compare only: a host of another size that never grows, at equal FLOPs, as in "
            f"{FIXED}hidden=16+depth=2",
        ),
    ]


def load_controller(name_or_path: str, device: torch.device | str = "cpu") -> Controller:
    """A controller by its name, by the folder of the run that trained it, or by a checkpoint.

    'tamiyo' is the pretrained one that ships with esper. A trained controller draws its choices as it did
    when it was trained; with ':greedy' after its name it takes the likeliest ones. Raises UserError for a
    name that nothing has.
    """
    if name_or_path.startswith((FINAL, BEST_OF, FIXED)):
        raise UserError(
            f"controller is {name_or_path!r}; that is an arm of 'esper compare' and decides nothing"
        )
    name, _, text = name_or_path.partition(":")
    if name in SCRIPTED:
        return _scripted(name, text)
    plain = name_or_path.removesuffix(GREEDY)
    return load_learned(find_checkpoint(plain), device, deterministic=plain != name_or_path)


def make_controller(given: str | Controller, device: torch.device) -> Controller:
    """A controller by name, by the run or checkpoint that holds it, or the given object itself."""
    if isinstance(given, str):
        return load_controller(given, device)
    missing = [name for name in ("begin", "decide") if not callable(getattr(given, name, None))]
    if missing:
        raise UserError(
            f"controller is a {type(given).__name__} without {' and '.join(missing)}; give one of "
            f"{', '.join(CONTROLLER_NAMES)}, or an object with begin(scene) and decide(observation, masks, "
            "step)"
        )
    return given


def find_checkpoint(name_or_path: str) -> Path:
    """Where a trained controller lies: in the package, in a run folder, or in the file itself."""
    path = Path(name_or_path)
    if name_or_path == PRETRAINED:
        shipped = SHIPPED / f"{PRETRAINED}.safetensors"
        if not shipped.is_file():
            raise UserError(
                f"this installation of esper ships no pretrained controller (looked for {shipped}); "
                "train one with 'esper train' and give the folder of that run instead of 'tamiyo'"
            )
        return shipped
    if path.is_dir():
        return CheckpointStore(RunFolder.read(path).checkpoints_path).last
    if path.is_file():
        return path
    near = difflib.get_close_matches(name_or_path, CONTROLLER_NAMES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"controller is {name_or_path!r}; {hint}allowed are {', '.join(CONTROLLER_NAMES)}, "
        "the folder of a run, or a checkpoint"
    )


def load_learned(
    path: Path, device: torch.device | str = "cpu", deterministic: bool = False
) -> LearnedController:
    """The controller of a checkpoint, which sees and remembers as it did when it was trained.

    Raises UserError where there is no file, CheckpointError where it is damaged or of another version.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: the run has finished no round yet")
    checkpoint = load_checkpoint(path, agent_schema())
    config = checkpoint_config(checkpoint, path, AGENT_SETTINGS)
    agent = make_agent(config, torch.device(device))
    try:
        agent.load_state_dict(under_prefix(LEARNER, checkpoint.tensors))
    except (ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not hold the agent that its settings describe: {error}") from None
    return LearnedController(agent, deterministic, conditions_in(checkpoint, path))


def conditions_in(checkpoint: Checkpoint, path: Path) -> Conditions:
    """The conditions that the controller of a checkpoint was trained under; by its settings in older ones."""
    if "conditions" in checkpoint.record:
        return Conditions.model_validate(checkpoint.record["conditions"])
    config = checkpoint_config(checkpoint, path)
    try:
        return conditions_of(make_specs(config, torch.device("cpu")))
    except UserError:  # a task of somebody's own that cannot be loaded here
        return conditions_of([config])


def conditions_of(settings: Sequence[EnvironmentSpec | RunConfig]) -> Conditions:
    """The conditions that these environments have together; the settings of a run alone name no host."""
    hosts: dict[str, dict[str, tuple[float, float]]] = {}
    minibatches: list[float] = []
    for one in settings:
        budget: float = one.episode.steps * one.population.batches_per_epoch
        if isinstance(one, EnvironmentSpec):
            kind, sizes = _host_of(one)
            known = hosts.setdefault(kind, {})
            known |= {n: _range([size, *known.get(n, ())]) for n, size in sizes.items()}
            if one.episode.flops is not None:
                budget = one.episode.flops / _minibatch_flops(one)
        minibatches += [share * budget for share in one.budgets]
    return Conditions(
        clock=settings[0].episode.clock,
        minibatches=_range(minibatches),
        batch_size=_range([one.population.batch_size for one in settings]),
        learning_rate=_range([one.population.host_lr for one in settings]),
        schedules=tuple(sorted({one.population.schedule for one in settings})),
        hosts=hosts,
        blueprints=tuple(sorted(settings[0].lifecycle.block_blueprints)),
    )


def _host_of(spec: EnvironmentSpec) -> tuple[str, dict[str, int]]:
    """The kind of a host and the options that decide its size; a model of the user's is of no known kind."""
    host = spec.task.host
    if spec.make_host is not None or host.preset not in HOST_PRESETS:
        return "a model of your own", {}
    taken = inspect.signature(HOST_PRESETS[host.preset]).parameters
    options = {name: taken[name].default for name in SIZE_OPTIONS if name in taken}
    options |= host.options
    sizes = {name: int(options[name]) for name in SIZE_OPTIONS if name in options}
    if host.preset == "resnet":
        sizes["hidden"] = sizes["hidden"] or sizes["width"]  # 0 is as many as the width
    return host.preset, sizes


def _minibatch_flops(spec: EnvironmentSpec) -> float:
    """Training FLOPs of one minibatch of the bare host."""
    alone = replace(spec, members=torch.zeros(1, dtype=torch.long), device="cpu", rate_scale=())
    return GrowthEnvironment(alone).bare_cost / spec.population.batches_per_epoch


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def why_not_here(name: str, controller: Controller, spec: EnvironmentSpec, override: str) -> str | None:
    """Why a controller does not grow in an environment, in one sentence; None where it may.

    override: what lets it act all the same, as the caller would write it.
    """
    trained = getattr(controller, "conditions", None)  # a user's own controller may have none
    found = differences(trained, conditions_of([spec])) if trained is not None else []
    if not found:
        return None
    return (
        f"{name} does not grow here, because it is outside the conditions that it was trained in: "
        f"{' and '.join(found)}; {override} lets it act all the same"
    )


def checkpoint_config(checkpoint: Checkpoint, path: Path, only: Sequence[str] = ()) -> RunConfig:
    """The settings of the run that wrote a checkpoint: all, or `only` some and defaults for the others."""
    config = checkpoint.record.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path} holds no settings of a run; give a checkpoint that 'esper train' wrote"
        )
    try:
        return saved_config({key: config[key] for key in only or config if key in config})
    except UserError as error:
        raise CheckpointError(f"{path} was written by another version of esper: {error}") from None


def _scripted(name: str, text: str) -> Controller:
    script = SCRIPTED[name]
    if not text:
        return script.plain()
    if script.from_text is None:
        raise UserError(f"controller is '{name}:{text}'; {name} takes nothing after a colon")
    try:
        return script.from_text(text)
    except (ValueError, OverflowError) as error:
        raise UserError(f"controller is '{name}:{text}'; after the colon: {script.takes} ({error})") from None


# ---- the arms of a comparison, from their names ----------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """An arm of networks that never change."""

    of: str = ""  # the controller whose final networks they are; by default the task's own host
    host: Mapping[str, int] = field(default_factory=dict)  # options of the host that are other than its own
    restarts: int = 1  # hosts that share the compute of a member, 0 for as many as it pays for


Arm = Controller | Fixed


def arms_that_may_grow(arms: Mapping[str, Arm], spec: EnvironmentSpec) -> tuple[dict[str, Arm], list[str]]:
    """Put networks that never grow in place of controllers outside the conditions that they were trained in.

    Returns the arms, and one sentence for each controller that does not act.
    """
    told = {
        name: why
        for name, arm in arms.items()
        if not isinstance(arm, Fixed) and (why := why_not_here(name, arm, spec, "--force"))
    }
    changed = {
        name: Fixed() if name in told or (isinstance(arm, Fixed) and arm.of in told) else arm
        for name, arm in arms.items()
    }
    return changed, list(told.values())


def arms_of(text: str, config: RunConfig) -> dict[str, Arm]:
    """'static,habit,heuristic,final:heuristic,best-of:8,runs/mine' as arms by the names that they are shown
    under, in the order of the table; the first one is the baseline.

    A controller whose final networks are asked for takes part too. Raises UserError where nothing is named,
    something is named twice, or a controller cannot be loaded.
    """
    asked = [part.strip() for part in text.split(",")]
    if not all(asked):
        raise UserError(
            f"--controllers is {text!r}; give some of {', '.join(CONTROLLER_NAMES)}, run folders, "
            f"{FINAL}NAME and {BEST_OF}:K, with one comma between two of them"
        )
    twice = sorted({part for part in asked if asked.count(part) > 1})
    if twice:
        raise UserError(f"--controllers names {', '.join(twice)} more than once; name each arm once")
    for part in asked:
        of = part.removeprefix(FINAL)
        if of != part and (of == "static" or of.startswith((FINAL, BEST_OF, FIXED))):
            raise UserError(
                f"--controllers names {part!r}, and that is no network of a controller that grows; after "
                f"{FINAL} give a controller, as in {FINAL}heuristic"
            )
    named = dict.fromkeys(chain.from_iterable((part.removeprefix(FINAL), part) for part in asked))
    shown = {name: _shown(name) for name in named if not name.startswith((FINAL, BEST_OF, FIXED))}
    if len(set(shown.values())) < len(shown):
        shown = {name: name for name in shown}
    arms: dict[str, Arm] = {}
    for name in named:
        if name.startswith(FINAL):
            of = shown[name.removeprefix(FINAL)]
            arms[f"{FINAL_OF}{of}"] = Fixed(of=of)
        elif name.startswith(BEST_OF):
            arms[name] = Fixed(restarts=restarts_of(name))
        elif name.startswith(FIXED):
            arms[name] = Fixed(host=host_options(name))
        else:
            loaded = load_controller(name, own_device(config.device))
            check_schedule(loaded, config)
            arms[shown[name]] = Fixed() if isinstance(loaded, Static) else loaded
    return arms


def _shown(name: str) -> str:
    """A path is shown by its last part; a checkpoint inside a run by the run's."""
    if name.partition(":")[0] in CONTROLLER_NAMES:
        return name
    parts = Path(name).parts
    return parts[-3] if len(parts) > 2 and parts[-2] == "checkpoints" else Path(name).name


def host_options(name: str) -> dict[str, int]:
    """The options in 'fixed:hidden=16+depth=2'; raises UserError where they cannot be those of a host."""
    pairs = [part.partition("=") for part in name.removeprefix(FIXED).split("+")]
    options = {option: int(value) for option, _, value in pairs if option and value.isdecimal()}
    if len(options) < len(pairs):
        raise UserError(
            f"controller is {name!r}; after the colon: options of the host, each once, as in "
            f"{FIXED}hidden=16+depth=2"
        )
    try:
        return build(HostConfig, options).options()
    except UserError as error:
        raise UserError(f"controller is {name!r}, and {error}") from None


def check_schedule(controller: Controller, config: RunConfig) -> None:
    """Raise UserError for a schedule that asks for more seeds in a slot than a slot can ever take.

    A slot takes `population.folds` seeds that become part of the host, and one more that stays in it.
    """
    most = config.population.folds + 1
    times = max((event.times for event in getattr(controller, "events", ())), default=0)
    if isinstance(controller, Schedule) and times > most:
        raise UserError(
            f"the schedule asks for {times:,} seeds in a slot, and one takes at most {most} while "
            f"population.folds is {most - 1}; ask for fewer, or set population.folds={times - 1}"
        )


def restarts_of(name: str) -> int:
    """The number in 'best-of:8', 0 in 'best-of'; raises UserError where it is none of 1 to 1000."""
    _, colon, text = name.partition(":")
    if colon and not (text.isdecimal() and 1 <= int(text) <= 1000):
        raise UserError(
            f"controller is {name!r}; after the colon: how many networks, 1 to 1000, as in best-of:8"
        )
    return int(text or 0)
