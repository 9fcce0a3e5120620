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

    from verl_ext.compose import CONFIG_MODULE, PRIMARY, store_primary

    def compose_overrides(*overrides: str, base: str = "ppo_trainer"):
        store_primary(base)
        with hydra.initialize_config_module(CONFIG_MODULE, version_base=None):
            return hydra.compose(PRIMARY, overrides=list(overrides))

    return compose_overrides
