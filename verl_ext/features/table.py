"""The list of features, functions that a launch, doctor, plan and the trainer call for all of them, and the start-up
table.

The table shows what is on and where it acts. The run stops if a feature that acts in a worker or a rollout engine is
not found there. A feature of the trainer needs no such check: it is in the class that prints the table.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import ConfigError, HookError
from verl_ext.features.advantages import ESTIMATOR
from verl_ext.features.bypass import BYPASS_MODE
from verl_ext.features.cascade_attention import CASCADE_ATTENTION
from verl_ext.features.corrections import CORRECTION
from verl_ext.features.fake_quantization import FAKE_QUANTIZATION
from verl_ext.features.feature import Demand, Engines, Feature, Need, RunFeatures, TableLine
from verl_ext.features.filters import FILTER
from verl_ext.features.float32_head import FLOAT32_HEAD
from verl_ext.features.guard import GUARD
from verl_ext.features.losses import POLICY_LOSS, foreign_loss
from verl_ext.features.mismatch import MISMATCH
from verl_ext.features.rescoring import RESCORING
from verl_ext.features.routing import ROUTING
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.sync_canary import CANARY
from verl_ext.features.top_tokens import TOP_TOKENS
from verl_ext.features.trajectories import TRAJECTORIES
from verl_ext.features.verl_config import BYPASS, check_model_files, check_overlong, check_warmup

USUAL = StabilityConfig()
OFF_VALUES = (None, False, 0, "disabled")  # values that switch something off

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
    CASCADE_ATTENTION,
    FAKE_QUANTIZATION,
    FLOAT32_HEAD,
    BYPASS_MODE,
    TOP_TOKENS,
)


def read_features(config: DictConfig, stability: StabilityConfig, *, read_model: bool = True) -> RunFeatures:
    """Returns the features that a run's config switches on, from the config alone.

    Raises:
        ConfigError: no feature is on, but a setting has been changed.
    """
    run, asked = RunFeatures(config, stability, read_model=read_model), None
    while asked != run.demands:  # a feature's need may switch another feature on
        asked, run = run.demands, replace(run, demands=tuple(_demands(run)))
    if not run.demands:  # verl runs unchanged, and `check_run` is not called
        _check_nothing_on(run)
    return run


def _demands(run: RunFeatures) -> Iterator[Demand]:
    for feature in FEATURES:
        yield from feature.needs(run)


def check_run(run: RunFeatures) -> None:
    """Raises ConfigError for settings that cannot work together: one line that names the remedy."""
    if not run.config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=False has no hooks for stability.*", fix=("trainer.use_v1=True",))
    for feature in FEATURES:
        feature.check(run)
    _check_loss_runs(run)
    _check_expected(run)
    _check_preconditions(run)
    check_overlong(run.config)
    check_warmup(run.config)
    if run.read_model:
        check_model_files(run.config.actor_rollout_ref.model)


def _check_loss_runs(run: RunFeatures) -> None:
    """Refuses features that need our loss if the workers cannot run it."""
    if not (why := foreign_loss(run.config)):
        return
    for demand in run.demands:
        if Need.MEASURED_IN_UPDATE in demand.needs:
            raise ConfigError(
                f"in bypass mode the gap is measured by the workers' loss: {why}", fix=(f"{BYPASS}=False",)
            )
        if Need.OUR_LOSS in demand.needs:
            raise ConfigError(
                f"{demand.setting} needs the plugin's loss in the workers: {why}",
                fix=demand.off,
                otherwise="" if demand.off else "leave it out",
                fallback=demand.off,
            )


def _check_nothing_on(run: RunFeatures) -> None:
    """Refuses each changed setting, because no feature is on."""
    _check_expected(run)
    ESTIMATOR.check(run)
    if run.stability == replace(USUAL, expects=run.stability.expects, left_out=run.stability.left_out):
        return
    for feature in FEATURES:  # their errors are more precise
        feature.check(replace(run, read_model=False))
    _check_preconditions(run)
    for name in _names_of(USUAL):
        if name not in ("expects", "left_out"):
            _require_usual(run, name, "no feature of stability.* is on", "stability=moe or another preset")


def _names_of(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names of all settings of a dataclass and its nested dataclasses."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            yield from _names_of(value, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name


def _check_preconditions(run: RunFeatures) -> None:
    for feature in FEATURES:
        for precondition in feature.preconditions:
            if not precondition.met(run):
                for name in precondition.settings:
                    _require_usual(run, name, precondition.why, precondition.switch)


def _require_usual(run: RunFeatures, name: str, why: str, switch: str) -> None:
    """Refuses a setting that has no effect, unless it has its default or switches something off."""
    value, usual = (attrgetter(name)(stability) for stability in (run.stability, USUAL))
    if value != usual and value not in OFF_VALUES:
        raise ConfigError(
            f"stability.{name}={_as_yaml(value)} has no effect: {why}",
            fix=(reset := (f"stability.{name}={_as_yaml(usual)}",)),
            otherwise=switch,
            fallback=reset,
        )


def _check_expected(run: RunFeatures) -> None:
    """Refuses an override that leaves a preset without its method."""
    for setting, expected in (run.stability.expects or {}).items():
        choices = expected if isinstance(expected, list) else [expected]
        given = OmegaConf.select(run.config, setting)
        if given not in choices:
            raise ConfigError(
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
