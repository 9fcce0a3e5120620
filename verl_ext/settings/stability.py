"""The `stability` node: validated when it is read, and parsed once into a frozen StabilityConfig.

Defaults stand in dataclasses alone: of what is no method here in this package, of a method beside its function.
`configs/stability/*.yaml` hold what a method changes.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

import verl_ext.core.filters
import verl_ext.core.losses  # noqa: F401 (both to register their methods)
from verl_ext.base.errors import ConfigError, require_choice
from verl_ext.base.methods import Chosen, build, choose, defaults, require_known
from verl_ext.core.corrections import CORRECTIONS, Correction
from verl_ext.core.filters import BatchFilter, get_batch_filter
from verl_ext.guard.rules import Rule
from verl_ext.settings.config import StabilityConfig, Switches
from verl_ext.settings.guard import BatchSkip, parse_rules

YAML_BOOLEANS = {True: "on", False: "off"}  # what YAML makes of a bare `on` and `off`
BATCH_SKIP = "batch_skip"


def stability_config(node: Any) -> StabilityConfig:
    """The validated settings of a Hydra `stability` node, or of a plain mapping.

    Imports the modules of `plugins`.

    Raises:
        ConfigError: a value is out of range or not among the choices, or a setting is unknown or has no use.
    """
    given = _plain(node)
    plugins = given.get("plugins") or []
    for module in [plugins] if isinstance(plugins, str) else plugins:
        try:
            import_module(str(module))
        except ImportError as error:
            raise ConfigError(f"stability.plugins: {module} cannot be imported ({error})") from error
    cascade = given.get("cascade_attention")
    if isinstance(cascade, bool):
        given["cascade_attention"] = YAML_BOOLEANS[cascade]
    given["guard"] = dict(given.get("guard") or {})
    rules, corrections = parse_rules(given["guard"].pop("rules", None)), _corrections(given)
    filters = _chosen_filters(given.pop("filters", None))
    known = [*(one.name for one in fields(Switches)), "correction", "filters", *CORRECTIONS]
    require_known(given, known, "stability", "docs/settings.md has all that are")
    switches = build(Switches, given, "stability")
    return StabilityConfig(
        **vars(switches),
        correction=corrections,
        filters=filters,
        rules=(*_batch_skip_rule(switches.batch_skip, rules), *rules),
    )


def default_node() -> dict[str, Any]:
    """Every setting with its default, as the files of `configs/stability` start from it."""
    node = defaults(Switches)
    node["guard"]["rules"] = None
    methods = {name: defaults(method.settings) for name, method in CORRECTIONS.items()}
    return {"correction": "none", **methods, "filters": None, **node}


def _plain(node: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.is_config(node):
        return dict(node or {})
    try:
        plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"stability={plain} must be a mapping of its settings")
    return {str(name): value for name, value in plain.items()}


def _corrections(given: dict[str, Any]) -> tuple[Chosen[Correction], ...]:
    """Those of `correction`, with their settings; both are taken out of what is given."""
    wanted = given.pop("correction", "none")
    names = [name for name in _names("stability.correction", wanted) if name != "none"]
    for name in names:
        require_choice("stability.correction", name, ("none", *CORRECTIONS))
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
                f"stability.{name} is set, and stability.correction={wanted} does not use it; add {name} there, or "
                "leave the setting out"
            )
    return tuple(choose(CORRECTIONS[name], settings.get(name), f"stability.{name}") for name in names)


def _chosen_filters(given: Any) -> tuple[Chosen[BatchFilter], ...]:
    if not isinstance(given, Mapping):
        names = _names("stability.filters", given)
        if len(set(names)) < len(names):
            raise ConfigError(f"stability.filters={names} names a filter twice")
        given = {name: {} for name in names}
    return tuple(
        choose(get_batch_filter(str(name)), settings, f"stability.filters.{name}") for name, settings in given.items()
    )


def _names(setting: str, given: Any) -> list[str]:
    """A name or a list of names as a list."""
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
