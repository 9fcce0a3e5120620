"""Reads the `stability` node, once, into a frozen `features.settings.StabilityConfig`.

A preset of `configs/stability/*.yaml` has only the settings that differ from the defaults.
"""

import inspect
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError, Problems, UserError
from verl_ext.base.methods import ConfiguredMethod, build, choose, defaults, require_known, require_method
from verl_ext.base.metrics import comes_late
from verl_ext.core.corrections import CORRECTIONS, Correction
from verl_ext.core.filters import BatchFilter, get_batch_filter
from verl_ext.features.settings import BATCH_SKIP, GUARD_NODE, BatchSkip, StabilityConfig, Switches, check_signal
from verl_ext.guard import levels
from verl_ext.guard.rules import ACTIONS, FEWEST_FOR_ZSCORE, SIDES, Rule, late_skip

# The keys of a rule in the config, in addition to its bound: the arguments of Rule that the parser does not set.
RULE_SETTINGS = tuple(
    name for name in inspect.signature(Rule).parameters if name not in ("name", "bound", "side", "setting")
)
RULE_NEEDS = ("signal", "action")  # in addition to one of SIDES
OWN_EFFECT = "correction/"  # metrics that the action tighten itself changes


def stability_config(node: Any) -> StabilityConfig:
    """Returns the validated settings of a Hydra `stability` node, or of a plain mapping.

    Imports the modules of `plugins`.

    Raises:
        ConfigError: values are out of range or not among the choices, or settings are unknown or have no use; it has
            all of them.
    """
    given = _plain(node)
    given["plugins"] = _names("stability.plugins", given.get("plugins"))
    import_plugins("stability.plugins", given["plugins"])
    for name in ("cascade_attention", "reuse_log_probs"):
        if isinstance(switch := given.get(name), bool):  # YAML reads an unquoted `on` or `off` as a bool
            given[name] = "on" if switch else "off"
    guard, problems = given.get("guard"), Problems()
    rules: tuple[Rule, ...] = ()
    if isinstance(guard, Mapping):  # `build` refuses another type
        given["guard"] = {name: value for name, value in guard.items() if name != "rules"}
        with problems:
            rules = parse_rules(guard.get("rules"))
    with problems:
        corrections = _corrections(given)
    with problems:
        filters = _chosen_filters(given.pop("filters", None))
    known = [*(one.name for one in fields(Switches)), "correction", "filters", *CORRECTIONS]
    with problems:
        require_known(given, known, "stability", "docs/settings.md lists all settings")
        switches = build(Switches, {name: given[name] for name in given if name not in CORRECTIONS}, "stability")
        rules = (*_batch_skip_rule(switches.batch_skip, rules), *rules)
    problems.raise_any()
    return StabilityConfig(**vars(switches), correction=corrections, filters=filters, rules=rules)


def default_node() -> dict[str, Any]:
    """Returns every setting with its default; the files of `configs/stability` start from it."""
    node = defaults(Switches)
    node["guard"]["rules"] = None
    methods = {name: defaults(method.settings) for name, method in CORRECTIONS.items()}
    return {"correction": "none", **methods, "filters": None, **node}


def import_plugins(setting: str, modules: Sequence[str]) -> None:
    """Imports the user's modules, which `setting` names, as a run would that is started in this folder.

    Raises:
        ConfigError: a module cannot be imported, whatever error it ends with.
    """
    if modules:
        import_from_here()
    for module in modules:
        if not module or module.startswith("."):
            raise ConfigError(f"{setting}={list(modules)} must be full names of modules")
        try:
            import_module(module)
        except (ImportError, SyntaxError, UserError) as error:
            raise ConfigError(f"{setting}: {module} cannot be imported ({error})") from error
        except Exception as error:  # a mistake in the module
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error}, {at.filename}, line {at.lineno}"
            raise ConfigError(f"{setting}: {module} cannot be imported ({said})") from error


def import_from_here() -> None:
    """Lets Python find modules in the current folder, as `python -m` does, which starts a run."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def _plain(node: Any) -> dict[str, Any]:
    plain = {} if node is None else node
    if OmegaConf.is_config(node):
        try:
            plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    if not isinstance(plain, Mapping):
        raise ConfigError(f"stability={plain} must be a mapping of its settings")
    return {str(name): value for name, value in plain.items()}


def _corrections(given: dict[str, Any]) -> tuple[ConfiguredMethod[Correction], ...]:
    """Returns the corrections that `correction` names, with their settings; removes both from `given`."""
    wanted = given.pop("correction", "none")
    names = [name for name in _names("stability.correction", wanted) if name != "none"]
    for name in names:
        require_method("stability.correction", name, ("none", *CORRECTIONS))
    if len(set(names)) < len(names):
        raise ConfigError(f"stability.correction={names} names a correction twice")
    settings = {name: given.pop(name) for name in CORRECTIONS if name in given}
    for name, values in settings.items():
        usual = defaults(CORRECTIONS[name].settings)
        changed = not isinstance(values, Mapping | None) or any(
            value != usual.get(key) for key, value in (values or {}).items()
        )
        if changed and name not in names:
            choose(CORRECTIONS[name], values, f"stability.{name}")
            raise ConfigError(
                f"stability.{name} is set, and stability.correction={wanted} does not use it",
                fix=(f"stability.{name}=null",),
                otherwise=f"add {name} to stability.correction",
            )
    return tuple(choose(CORRECTIONS[name], settings.get(name), f"stability.{name}") for name in names)


def _chosen_filters(given: Any) -> tuple[ConfiguredMethod[BatchFilter], ...]:
    if not isinstance(given, Mapping):
        names = _names("stability.filters", given)
        if len(set(names)) < len(names):
            raise ConfigError(f"stability.filters={names} names a filter twice")
        given = {name: {} for name in names}
    return tuple(
        choose(get_batch_filter(str(name)), settings, f"stability.filters.{name}") for name, settings in given.items()
    )


def _names(setting: str, given: Any) -> list[str]:
    """Returns a name or a list of names as a list."""
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{setting}={given} must be a name or a list of names")
    return list(names)


def _batch_skip_rule(skip: BatchSkip, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    if skip.threshold is None:
        return ()
    if any(rule.name == BATCH_SKIP for rule in rules):
        raise ConfigError(f"stability.guard.rules.{BATCH_SKIP}: the name is taken by stability.batch_skip")
    setting = f"stability.{BATCH_SKIP}.threshold"
    return (Rule(BATCH_SKIP, skip.metric, skip.threshold, action="skip", setting=setting),)


def parse_rules(given: Any) -> tuple[Rule, ...]:
    """Parses `stability.guard.rules`, name -> {signal, above or below, action, recover, patience, zscore_window,
    advice, ...} as in `guard.rules.Rule`, in the order of the config. null leaves a preset's rule out.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, or an action cannot follow its signal.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{GUARD_NODE}.rules={given} must be a mapping from a name to a rule")
    parsed, problems = list[Rule](), Problems()
    for name, rule in (given or {}).items():
        with problems:
            if rule is not None:
                parsed.append(_parse_rule(str(name), rule))
    problems.raise_any()
    return tuple(parsed)


def _parse_rule(name: str, given: Any) -> Rule:
    where = f"{GUARD_NODE}.rules.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given} must be a mapping with a signal, a bound and an action")
    rule = dict(given)
    require_known(rule, sorted([*RULE_SETTINGS, *SIDES]), where)
    sides = [side for side in SIDES if rule.get(side) is not None]
    if len(sides) != 1:
        raise ConfigError(f"{where} needs one bound: above or below")
    (side,) = sides
    for key in RULE_NEEDS:
        if not isinstance(rule.get(key), str):
            raise ConfigError(f"{where}.{key} must be given")
    if not isinstance(rule.get("advice") or "", str):
        raise ConfigError(f"{where}.advice={rule['advice']} must be text")
    for key in (side, "recover", "least"):
        value = rule.get(key)
        if value is not None and not _is_finite(value):
            raise ConfigError(f"{where}.{key}={value} must be a finite number")
    for key, least in (("patience", 1), ("zscore_window", FEWEST_FOR_ZSCORE), ("baseline", 1)):
        value = rule.get(key)
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"{where}.{key}={value} must be a whole number of readings, at least {least}")
    for key in ("engines_only", "locate"):
        if not isinstance(rule.get(key) or False, bool):
            raise ConfigError(f"{where}.{key}={rule[key]} must be true or false")
    if name == levels.NAME:
        raise ConfigError(f"{where}: the name is taken by {levels.SETTING}")
    settings = {key: value for key, value in rule.items() if key in RULE_SETTINGS and value is not None}
    parsed = Rule(name, bound=float(rule[side]), side=side, setting=f"{where}.{side}", **settings)
    _check_rule(parsed, where)
    return parsed


def _check_rule(rule: Rule, where: str) -> None:
    check_signal(where, rule.signal)
    if rule.action not in ACTIONS:
        raise ConfigError(f"{where}.action={rule.action} is not known; choose one of: {', '.join(ACTIONS)}")
    if rule.zscore_window is not None and rule.bound <= 0:
        raise ConfigError(
            f"{where}: with zscore_window, {rule.side}={rule.bound:g} is a number of robust standard deviations from "
            "the median to that side, and must be above 0"
        )
    if rule.zscore_window is not None and rule.baseline is not None:
        raise ConfigError(f"{where}: zscore_window and baseline are two ways to find the threshold; keep one of them")
    if rule.least and rule.baseline is None:
        raise ConfigError(f"{where}.least={rule.least:g} needs baseline, a number of first readings")
    for key in ("engines_only", "locate"):
        if getattr(rule, key) and not rule.signal.startswith("vllm_kl/"):
            raise ConfigError(f"{where}.{key}=true needs a metric of the gap, vllm_kl/*, and {rule.signal} is none")
    if rule.locate and rule.side == "below":
        raise ConfigError(f"{where}.locate=true needs a bound above which the gap is too large: above")
    farther = rule.recover is not None and (
        rule.recover > rule.bound if rule.side == "above" or rule.zscore_window else rule.recover < rule.bound
    )
    if farther:
        raise ConfigError(
            f"{where}.recover={rule.recover:g} lies past {rule.side}={rule.bound:g}: the rule would end while its "
            "signal is still past the bound"
        )
    if rule.action == "skip" and comes_late(rule.signal):
        raise late_skip(rule)
    if rule.action == "tighten" and rule.signal.startswith(OWN_EFFECT):
        raise ConfigError(f"{where}: a narrower band itself raises {rule.signal}, so the rule would not recover")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
