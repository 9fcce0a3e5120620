"""Arguments that describe a run, for doctor, plan and probe, and the config that they give."""

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError
from verl_ext.base.printable import printable

FLAGS = ("config-path", "config-name")
KEY = "hydra.searchpath"
MOST_SAID = 2000  # characters of an error; OmegaConf can print a key in 1,000 brackets
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


def compose(arguments: Sequence[str], *, trust: bool = False) -> tuple[DictConfig | None, str]:
    """Returns the config of a run, or None and the reason.

    Without `trust`, a config is refused if Hydra would import packages (`pkg://` in hydra.searchpath) other than
    verl's and ours.
    """
    try:
        import hydra

        from verl_ext.launch import compose as ours
    except ImportError as error:
        return None, f"the run's config cannot be composed here: {error}"
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
            return None, f"hydra.searchpath={packages} would be imported; --trust allows it"
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            return hydra.compose(name, overrides), ""
    except Exception as error:  # a broken config makes Hydra and OmegaConf raise nearly any error
        said = str(error).partition("\nConfig search path:")[0] or type(error).__name__
        return None, printable(" ".join(said.split()), MOST_SAID)


def required_config(arguments: argparse.Namespace) -> DictConfig:
    """Returns the config that the arguments describe, fitted to the run.

    Raises:
        ConfigError: the config cannot be composed, or it would import modules without --trust.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what --trust imports may print
        config, failure = compose(given_arguments(arguments), trust=arguments.trust)
    if config is None:
        raise ConfigError(failure)
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
