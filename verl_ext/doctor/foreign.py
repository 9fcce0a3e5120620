"""Code that a config names. A run executes it; a look at somebody's config must not, unless it was told to (--trust).

    stability.plugins             imported by `StabilityConfig`
    model.trust_remote_code       lets transformers import Python files that lie beside the model
    _target_                      called by `hydra.utils.instantiate` in verl's `validate_config`: any callable
    hydra.searchpath=[pkg://...]  imported by Hydra as it composes (`composed.py` looks before)

What else a config names, such as reward functions, data set classes, `external_lib`, agent loops and chat templates, is
used by a run alone: no check of this folder goes near it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verl_ext.doctor.context import MODEL, Context
from verl_ext.doctor.findings import Finding, check

BUILT = ("actor_rollout_ref.actor", "critic")  # what validate_config instantiates
FOLDERS = ("actor", "critic", "engine", "optim", "profiler")  # of verl's configs: what those two are composed of
TARGET = re.compile(r"^\s*_target_:\s*([\w.]+)", re.MULTILINE)


@check("code")
def code(context: Context) -> Iterable[Finding]:
    """What the config names to be executed, and which checks were left out for it.

    Source: `StabilityConfig.__post_init__` of verl_ext/settings/stability.py; `get_class_from_dynamic_module` of
    transformers/dynamic_module_utils.py (5.10); `omega_conf_to_dataclass` of verl/utils/config.py (0.9.1).
    """
    if context.config is None or context.trust:
        return
    if plugins := context.plugin_modules:
        yield Finding(
            "note",
            f"stability.plugins={plugins} was not imported",
            "hooks and verl's validation were not checked; --trust imports it, as the run does",
        )
    if context.model_code:
        yield Finding(
            "note",
            f"{MODEL}.trust_remote_code=True, and the model has code of its own, which was not run",
            "lengths, vocabulary, tokenizer and the model's routers were not checked; --trust runs it, as the run does",
        )
    for path, target in _unknown_targets(context.config):
        yield Finding(
            "warning",
            f"{path}._target_={target} is no settings class of verl or verl_ext, and was not called",
            "the run would call it, whatever it is; verl's validation was not checked; --trust calls it",
        )


def unknown_targets(built: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Place and name of each `_target_` that is not one of the settings classes; of `built_settings`."""
    known = settings_classes()
    found = (pair for path, values in built.items() for pair in _targets(values, path))
    return [(place, str(target)) for place, target in found if not isinstance(target, str) or target not in known]


def built_settings(config: Any) -> dict[str, Any]:
    """The parts of a config that verl's validation builds, as plain values; of the critic, without its model.

    Building that (`HFModelConfig`) imports its external_lib, loads its tokenizer and may copy its files by a shell
    command; the validation reads none of it.

    Raises:
        OmegaConfBaseException: an interpolation does not resolve.
    """
    from omegaconf import OmegaConf

    built = {path: OmegaConf.select(config, path) for path in BUILT}
    built = {path: OmegaConf.to_container(node, resolve=True) for path, node in built.items() if node is not None}
    if "critic" in built:
        built["critic"]["model"] = None
    return built


def settings_classes() -> set[str]:
    """The classes that verl's own files for actor and critic name, and what makes those of our losses."""
    from verl_ext.launch.compose import VERL_CONFIGS
    from verl_ext.settings import losses

    files = (file for folder in FOLDERS for file in (VERL_CONFIGS / folder).glob("*.yaml"))
    verls = {target for file in files for target in TARGET.findall(file.read_text(encoding="utf-8"))}
    return {*verls, losses.TARGET}


def _unknown_targets(config: Any) -> list[tuple[str, str]]:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return unknown_targets(built_settings(config))
    except OmegaConfBaseException:  # told by the validation
        return []


def _targets(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        if "_target_" in values:
            yield path, values["_target_"]
        for key, value in values.items():
            yield from _targets(value, f"{path}.{key}")
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _targets(value, f"{path}.{index}")
