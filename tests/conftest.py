"""Shared fixtures: the CPU platform, and the real composed config."""

import os
from collections.abc import Callable

import pytest

# Before anything imports verl: its platform is chosen once.
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def compose() -> Callable:
    """compose("stability=icepop", ...) -> the config that `verl_ext.main_ppo` gets."""
    import hydra

    import verl_ext.main_ppo  # noqa: F401 (registers the schema)

    def compose_overrides(*overrides: str):
        with hydra.initialize_config_module("verl_ext.configs", version_base=None):
            return hydra.compose("ppo_trainer_ext", overrides=list(overrides))

    return compose_overrides
