"""How Hydra composes a run: verl's config with the groups `stability` and `recipe` beside it."""

import argparse
import os
from collections.abc import Sequence
from importlib.resources import files

import verl.trainer
from hydra.core.config_store import ConfigStore

from verl_ext.config import StabilityConfig, require_choice

CONFIG_MODULE = "verl_ext.configs"
PRIMARY = "verl_ext"
VERL_CONFIG = "ppo_trainer"


def store_primary(base: str = VERL_CONFIG) -> None:
    """Make the config `PRIMARY`: `base`, one of verl's or of the user's, then our two groups."""
    store = ConfigStore.instance()
    # The schema that every file of the group starts from; the underscore keeps it out of the choices.
    store.store(group="stability", name="_schema", node=StabilityConfig)
    store.store(
        name=PRIMARY,
        node={
            "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
            "defaults": [base, {"stability": "none"}, {"recipe": None}, "_self_"],
        },
    )


def stability_choices() -> tuple[str, ...]:
    """The files of `configs/stability`."""
    folder = files(CONFIG_MODULE) / "stability"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()))


def prepare(arguments: Sequence[str]) -> list[str]:
    """Store the primary config for these command-line arguments, and return those to give to Hydra.

    `--config-name` and `--config-path` name what verl's entry point would read; here that becomes the base of
    the primary config, found in verl's own folder or in the one given.

    Raises:
        ConfigError: `stability=` names no file of the group.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default=VERL_CONFIG)
    parser.add_argument("--config-path", "-cp")
    ours, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith("stability="):
            require_choice("stability", argument.removeprefix("stability="), stability_choices())
    store_primary(ours.config_name.removesuffix(".yaml"))
    if ours.config_path is not None:
        # verl reads a relative path from beside its own entry point, where `config` is.
        folder = os.path.join(os.path.dirname(verl.trainer.__file__ or ""), ours.config_path)
        rest = ["--config-dir", folder, *rest]
    return rest
