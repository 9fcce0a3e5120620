"""The list of features, functions that a launch, doctor, plan and the trainer call for all of them, and the start-up
table.

The table shows what is on and where it acts. The run stops if a feature that acts in a worker or a rollout engine is
not found there. A feature of the trainer needs no such check: it is in the class that prints the table.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import HookError, Problem, Problems
from verl_ext.features.advantages import ESTIMATOR
from verl_ext.features.bypass import BYPASS_MODE
from verl_ext.features.cascade_attention import CASCADE_ATTENTION
from verl_ext.features.corrections import CORRECTION
from verl_ext.features.fake_quantization import FAKE_QUANTIZATION
from verl_ext.features.feature import Demand, Engines, Feature, Need, RunFeatures, TableLine
from verl_ext.features.filters import FILTER
from verl_ext.features.float32_head import FLOAT32_HEAD
from verl_ext.features.guard import GUARD, signals
from verl_ext.features.losses import POLICY_LOSS, foreign_loss
from verl_ext.features.mismatch import MISMATCH
from verl_ext.features.rescoring import RESCORING
from verl_ext.features.reuse import REUSE
from verl_ext.features.routing import ROUTING
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.sync_canary import CANARY
from verl_ext.features.sync_check import SYNC_CHECK
from verl_ext.features.top_tokens import TOP_TOKENS
from verl_ext.features.trajectories import TRAJECTORIES
from verl_ext.features.verl_config import BYPASS, bypasses, judged, model_problems, overlong_problems, warmup_problems

USUAL = StabilityConfig()
OFF_VALUES = (None, False, 0, "disabled", "auto")  # values that switch something off, or on only where it can be

# In the order of the start-up table.
FEATURES: tuple[Feature, ...] = (
    MISMATCH,
    CORRECTION,
    FILTER,
    ESTIMATOR,
    RESCORING,
    TRAJECTORIES,
    POLICY_LOSS,
    GUARD,
    ROUTING,
    CANARY,
    SYNC_CHECK,
    CASCADE_ATTENTION,
    FAKE_QUANTIZATION,
    FLOAT32_HEAD,
    BYPASS_MODE,
    REUSE,
    TOP_TOKENS,
)


def read_features(config: DictConfig, stability: StabilityConfig, *, read_model: bool = True) -> RunFeatures:
    """Returns the features that a run's config switches on, from the config alone."""
    run, asked = RunFeatures(config, stability, read_model=read_model), None
    while asked != run.demands:  # a feature's need may switch another feature on
        asked, run = run.demands, replace(run, demands=tuple(_demands(run)))
    return run


def _demands(run: RunFeatures) -> Iterator[Demand]:
    for feature in FEATURES:
        yield from feature.needs(run)


def problems_of(run: RunFeatures) -> list[Problem]:
    """Returns every problem of a run's settings.

    Their order counts, because a preset gives way to the first that has a `leave_out`: settings that contradict each
    other, what the run lacks for a feature, settings without an effect, and what verl asserts without a message.
    """
    found = Problems()
    if run.demands and not run.config.trainer.get("use_v1"):
        found.found.append(Problem("trainer.use_v1=False has no hooks for stability.*", fix=("trainer.use_v1=True",)))
    for rule in _rules(run):
        with found:  # a rule raises what it cannot parse
            found.found += judged(rule(run))
    if not run.demands and not found.found:
        found.found += judged(_unused_problems(run))
    return list(dict.fromkeys(found.found))


def _rules(run: RunFeatures) -> Iterator[Callable[[RunFeatures], Iterable[Problem]]]:
    """Yields the rules of a run. A run without features is verl's own, and none of its settings may be changed."""
    changed = run.stability != replace(USUAL, expects=run.stability.expects, left_out=run.stability.left_out)
    yield lambda run: run.stability.problems()
    if run.demands or changed:
        yield from (feature.problems for feature in FEATURES)
    else:
        yield from (ESTIMATOR.problems, POLICY_LOSS.problems)  # they have settings outside stability
    yield _expected_problems
    if run.demands:
        yield _foreign_loss_problems
        yield _signal_problems
    yield _setting_problems
    yield lambda run: overlong_problems(run.config)
    yield lambda run: warmup_problems(run.config)
    if run.demands and run.read_model:
        yield lambda run: model_problems(run.config.actor_rollout_ref.model)


def _foreign_loss_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields a problem for each feature that needs our loss, if the workers cannot run it."""
    if not (why := foreign_loss(run.config)):
        return
    for demand in run.demands:
        if Need.MEASURED_IN_UPDATE in demand.needs and bypasses(run.config):
            yield Problem(f"in bypass mode the gap is measured by the workers' loss: {why}", fix=(f"{BYPASS}=False",))
        elif Need.OUR_LOSS in demand.needs:
            yield Problem(
                f"{demand.setting} needs the plugin's loss in the workers: {why}",
                fix=demand.off,
                otherwise="" if demand.off else "leave it out",
                leave_out=demand.off,
            )


def _signal_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields a problem for each rule of the guard whose signal the run does not log: it could never act."""
    idle = [each for feature in FEATURES for each in feature.idle(run)]
    for setting, signal, off in signals(run.stability):
        found = next((each for each in idle if fnmatchcase(signal, each.metrics)), None)
        if found is not None:
            yield Problem(
                f"{setting}: {signal} is not logged: {found.why}",
                fix=found.switch or (off,),
                otherwise=f"set {off}" if found.switch else "",
                leave_out=(off,),
            )


def _names_of(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names of all settings of a dataclass and its nested dataclasses."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            yield from _names_of(value, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name


def _setting_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields a problem for each setting without an effect that is not its default and switches nothing off."""
    for each in (each for feature in FEATURES for each in feature.idle(run)):
        for name in each.settings:
            yield from _without_effect(run, name, each.why, " and ".join(each.switch))


def _unused_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields a problem for each setting that is changed although no feature is on."""
    for name in _names_of(USUAL):
        if name not in ("expects", "left_out"):
            yield from _without_effect(run, name, "no feature of stability.* is on", "stability=moe or another preset")


def _without_effect(run: RunFeatures, name: str, why: str, switch: str) -> Iterator[Problem]:
    value, usual = (attrgetter(name)(stability) for stability in (run.stability, USUAL))
    if value != usual and value not in OFF_VALUES:
        reset = (f"stability.{name}={_as_yaml(usual)}",)
        yield Problem(f"stability.{name}={_as_yaml(value)} has no effect: {why}", "", reset, switch, reset)


def _expected_problems(run: RunFeatures) -> Iterator[Problem]:
    """Yields a problem for an override that leaves a preset without its method."""
    for setting, expected in (run.stability.expects or {}).items():
        choices = expected if isinstance(expected, list) else [expected]
        given = OmegaConf.select(run.config, setting)
        if given not in choices:
            yield Problem(
                f"{setting}={_as_yaml(given)} leaves the preset without its method: it needs "
                f"{' or '.join(map(_as_yaml, choices))} (stability.expects)",
                fix=(f"{setting}={_as_yaml(choices[0])}",),
                otherwise="choose another preset",
            )


def _as_yaml(value: Any) -> str:
    """Returns a value as it is written in an override."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def apply_engine_settings(run: RunFeatures) -> None:
    """Sets the engines' arguments that the features need, and has the rollout send only what the features read."""
    from verl_ext.upstream import agent_loop

    wanted: dict[str, Any] = {}
    for feature in FEATURES:
        feature.apply(run)
        wanted |= feature.agent_loop(run)
    agent_loop.request(run.config, agent_loop.Extras(**wanted))


def loss_settings(run: RunFeatures) -> dict[str, Any]:
    """Returns the arguments of the workers' `configure_loss`."""
    found: dict[str, Any] = {}
    for feature in FEATURES:
        found |= feature.loss_settings(run)
    return found


def table_lines(run: RunFeatures) -> list[TableLine]:
    """Returns the lines of the start-up table."""
    return [line for feature in FEATURES for line in feature.lines(run)]


class StartupRow(NamedTuple):
    """A row of the start-up table: something that is on, and where it acts."""

    name: str
    setting: str
    where: str


def verify(run: RunFeatures, trainer_class: type, engines: Engines) -> list[StartupRow]:
    """Installs the workers' loss, if the run needs it. Returns the lines of the run's features, each with its place on
    the started engines, then what `features.fit` left out, with the reasons.

    Raises:
        HookError: a feature is not hooked.
    """
    places = {"trainer": next(cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.startswith("verl."))}
    if Need.OUR_LOSS in run.needs:
        engines.install_loss(loss_settings(run))
        places["loss"] = f"worker_loss on {len(engines.losses)} rank(s)"
    if Need.HOOKED_ROUTERS in run.needs:
        places["routers"] = engines.routers
    for feature in FEATURES:
        feature.prove(run, engines)
    rows = []
    for line in table_lines(run):
        if line.in_loss and not all(line.in_loss(found) for found in engines.losses):
            raise HookError(f"{line.name} ({line.setting}) is switched on, and a worker's loss does not have it")
        at = line.proof(engines) if line.proof else line.at
        rows.append(StartupRow(line.name, line.setting, at.format(**places)))
    return [*rows, *left_out(run)]


def left_out(run: RunFeatures) -> Iterator[StartupRow]:
    """Yields what was left out of the run's preset or set differently, with the reasons."""
    for overrides, why in (run.stability.left_out or {}).items():
        yield StartupRow("left out" if overrides.startswith("stability.") else "set", f"now {overrides}", why)


def print_table(rows: Iterable[StartupRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "setting", "where", title="verl_ext: active features", title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets in a rule's name or signal are no markup
    # Ray prefixes each line with the process's name, so the terminal's own width would be too much.
    Console(width=100).print(table)
