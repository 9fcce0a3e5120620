"""Arguments that describe a run, for doctor, plan and probe, and the config that they give."""

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError
from verl_ext.base.printable import printable
from verl_ext.features.verl_config import ACTOR

FLAGS = ("config-path", "config-name")
KEY = "hydra.searchpath"
MOST_SAID = 2000  # characters of an error; OmegaConf can print a key in 1,000 brackets
REFUSED = re.compile("Could not (?:override|append to config|delete from config)")  # Hydra's, on one override
MEGATRON_SIZE = f"{ACTOR}.megatron.tensor_model_parallel_size"
NO_MEGATRON = "the config has no settings of Megatron"
KNOWN_PATH = re.compile(r"file://|pkg://(verl|verl_ext)(\.|/|$)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="overrides of verl_ext.main_ppo, such as stability=icepop"
    )
    parser.add_argument("--config-path", metavar="DIR", help="Hydra's option, as for verl_ext.main_ppo")
    parser.add_argument("--config-name", metavar="NAME", help="Hydra's option, as for verl_ext.main_ppo")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that the config names: stability.plugins, a model's own code under trust_remote_code, "
        "classes in _target_; without --trust, checks that need this code are left out",
    )


def given_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the given arguments in the form that `verl_ext.main_ppo` takes."""
    values = {flag: getattr(arguments, flag.replace("-", "_")) for flag in FLAGS}
    return [*arguments.overrides, *(f"--{flag}={value}" for flag, value in values.items() if value)]


@dataclass(frozen=True)
class Refused:
    """An override that Hydra refuses.

    Attributes:
        how: "set", of a setting that does not exist; "add", of one that does; "delete", of one that does not, or that
            has another value.
    """

    key: str
    value: Any
    how: Literal["set", "add", "delete"]


@dataclass(frozen=True)
class Composed:
    """The config of a run, without the overrides that Hydra refuses; or None and the reason."""

    config: DictConfig | None
    failure: str = ""
    refused: tuple[Refused, ...] = ()


def compose(arguments: Sequence[str], *, trust: bool = False) -> Composed:
    """Composes the config of a run.

    Without `trust`, a config is refused if Hydra would import packages (`pkg://` in hydra.searchpath) other than
    verl's and ours.
    """
    try:
        import hydra

        from verl_ext.launch import compose as ours
    except ImportError as error:
        return Composed(None, f"the run's config cannot be composed here: {error}")
    try:
        folder, name, overrides = ours.VERL_CONFIGS, ours.PRIMARY, []
        for argument in ours.prepare(arguments):
            flag, _, value = argument.partition("=")
            if flag == "--config-path":
                folder = Path(value)
            elif flag == "--config-name":
                name = value
            else:
                overrides.append(argument)
        if not trust and (packages := _packages(folder / f"{name.removesuffix('.yaml')}.yaml", overrides)):
            return Composed(None, f"hydra.searchpath={packages} would be imported; --trust allows it")
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            try:
                return Composed(hydra.compose(name, overrides))
            except Exception as error:
                if not REFUSED.match(str(error)):
                    raise
                refused = _find_refused(name, overrides)
                config = hydra.compose(name, [one for one in overrides if one not in refused])
                megatrons = next((one.key for one in refused.values() if ".megatron." in one.key), None)
                if megatrons and OmegaConf.select(config, MEGATRON_SIZE) is None:
                    return Composed(None, f"{NO_MEGATRON}: {megatrons}")
                return Composed(config, "", tuple(refused.values()))
    except Exception as error:  # a broken config makes Hydra and OmegaConf raise nearly any error
        said = str(error).partition("\nConfig search path:")[0].partition("\nTo append to your config")[0]
        if (override := getattr(error, "override", None)) and override not in said:  # a text that does not parse
            said = f"{override}: {said}"
        return Composed(None, printable(" ".join(said.split()), MOST_SAID) or type(error).__name__)


def _find_refused(name: str, overrides: Sequence[str]) -> dict[str, Refused]:
    """Returns the overrides that Hydra refuses, as it finds only the first of them.

    It applies each to the config that the groups give, as `_apply_overrides_to_config` does in Hydra's
    hydra/_internal/config_loader_impl.py (1.3).
    """
    import hydra
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import ConfigCompositionException

    loader = GlobalHydra.instance().config_loader()
    parsed = dict(zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True))
    # Hydra's own settings are not in the config that it returns; one of them is where it looks for groups.
    hydras = [text for text, one in parsed.items() if one.is_hydra_override()]
    groups = [text for text, one in parsed.items() if loader.get_group_options(one.key_or_group.partition("@")[0])]
    config = hydra.compose(name, [*hydras, *groups])
    found = {}
    for text, one in parsed.items():
        if text in hydras or text in groups:
            continue
        try:
            ConfigLoaderImpl._apply_overrides_to_config([one], config)
        except ConfigCompositionException as error:
            if REFUSED.match(str(error)):  # others stop the second composition, as they stop the launch
                how: Any = "delete" if one.is_delete() else "add" if one.is_add() else "set"
                found[text] = Refused(one.key_or_group, one.value(), how)
    return found


def required_config(arguments: argparse.Namespace) -> DictConfig:
    """Returns the config that the arguments describe, fitted to the run.

    Raises:
        ConfigError: the config cannot be composed, or it would import modules without --trust.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what --trust imports may print
        composed = compose(given_arguments(arguments), trust=arguments.trust)
    config = composed.config
    if config is None:
        raise ConfigError(composed.failure)
    if keys := ", ".join(one.key for one in composed.refused):
        raise ConfigError(f"the launch would stop at {printable(keys, MOST_SAID)}; `verl-ext doctor` says why")
    if not arguments.trust and (named := plugins(config)):
        raise ConfigError(f"stability.plugins={named} would be imported; --trust allows it, or leave it out here")
    from verl_ext.features.fit import fit_run

    with contextlib.suppress(Exception):  # a launch would stop at the error; a plan is still possible
        fit_run(config, arguments.overrides, read_model=False)
    return config


def plugins(config: DictConfig | None) -> list[str]:
    """Returns the modules of stability.plugins, which verl_ext imports."""
    try:
        given = OmegaConf.select(config, "stability.plugins", throw_on_missing=False) if config is not None else None
    except OmegaConfBaseException:  # `stability_config` raises it before it imports a module
        return []
    names = OmegaConf.to_container(given) if OmegaConf.is_list(given) else [given] if given else []
    return [str(name) for name in names]


def _packages(primary: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the packages of hydra.searchpath, which Hydra imports, except verl's and ours.

    Hydra reads it only from the primary config and the command line: `_process_config_searchpath` of
    hydra/_internal/config_loader_impl.py (1.3).
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [
        one.value() for one in OverridesParser.create().parse_overrides(list(overrides)) if one.key_or_group == KEY
    ]
    if primary.is_file() and OmegaConf.is_dict(content := OmegaConf.load(primary)):
        given.append(OmegaConf.select(content, KEY))
    entries = [str(entry) for path in given for entry in (path if isinstance(path, Sequence) else [path])]
    return [entry for entry in entries if "://" in entry and not KNOWN_PATH.match(entry)]
