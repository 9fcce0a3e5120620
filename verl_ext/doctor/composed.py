"""The config of a run from its command line, as `verl_ext.main_ppo` would compose it; `plan` uses it too."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

FLAGS = ("config-path", "config-name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="as given to verl_ext.main_ppo, such as stability=icepop"
    )
    parser.add_argument("--config-path", metavar="DIR", help="Hydra's, as for verl_ext.main_ppo")
    parser.add_argument("--config-name", metavar="NAME", help="Hydra's, as for verl_ext.main_ppo")


def given(arguments: argparse.Namespace) -> list[str]:
    """What was given, as `verl_ext.main_ppo` takes it."""
    values = {flag: getattr(arguments, flag.replace("-", "_")) for flag in FLAGS}
    return [*arguments.overrides, *(f"--{flag}={value}" for flag, value in values.items() if value)]


def compose(arguments: Sequence[str]) -> tuple["DictConfig | None", str]:
    """The config of a run, or None and why there is none."""
    try:
        import hydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        import verl_ext.plugin  # noqa: F401 (as the entry point does)
        from verl_ext import compose as ours
        from verl_ext.errors import UserError
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
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            return hydra.compose(name, overrides), ""
    except (HydraException, OmegaConfBaseException, UserError, YAMLError) as error:
        said = str(error).partition("\nConfig search path:")[0]
        return None, " ".join(said.split())
