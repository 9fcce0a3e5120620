"""Hydra's `compose`, faster where the same files were composed before.

verl's config is made of 36 files; reading and merging them takes most of a second, and one case differs from the next
in a value or two. What the overrides choose of the groups is composed once; the values are set on a copy of that, by
the function of Hydra that sets them.
"""

import io
import pickle
from functools import cache
from unittest import mock

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from verl_ext.launch import compose as ours

whole, read_yaml, read_groups = hydra.compose, OmegaConf.load, ours._groups_in_defaults


def compose(config_name=None, overrides=None):
    """Composes as `hydra.compose` does, without its other arguments."""
    overrides = list(overrides or [])
    loader = GlobalHydra.instance().config_loader()
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        groups = [one for one in parsed if _chooses(loader, one)]
        values = [one for one in parsed if one not in groups]
        if any(one.is_hydra_override() or one.is_sweep_override() for one in parsed):
            return whole(config_name, overrides)
        chosen = tuple(one.input_line for one in groups)
        config = pickle.loads(_base(str(loader.get_search_path()), config_name, chosen))
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
    except Exception:  # the error is to be Hydra's own, word for word
        return whole(config_name, overrides)
    return config


def _chooses(loader, override):
    return loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)


def groups_in_defaults(file):
    """Reads a primary config's groups as `verl_ext.launch.compose` does; those of verl's own config only once."""
    return _verls_groups(file) if file.parent == ours.VERL_CONFIGS else read_groups(file)


_verls_groups = cache(read_groups)


@cache
def _base(search_path, config_name, groups):
    with mock.patch.object(OmegaConf, "load", lambda file: pickle.loads(_parsed(file.read()))):
        return pickle.dumps(whole(config_name, list(groups)))  # loaded in a tenth of the time of a deep copy


@cache
def _parsed(text):
    return pickle.dumps(read_yaml(io.StringIO(text)))


def install(patch=setattr) -> None:
    """Have this process compose so, `verl_ext.launch` too; `patch` sets an attribute."""
    patch(hydra, "compose", compose)
    patch(ours, "_groups_in_defaults", groups_in_defaults)
