"""Fits a preset to a run: what this engine, trainer mode or model cannot do is left out, with the reason.

A check that refuses a setting knows which overrides leave it out (`UserError.gives_way`). Where a preset, a recipe or a
config file asked for the setting, they are applied, and `stability.left_out` keeps the reason for the start-up table.
What the user wrote under `stability.` on the command line is refused.
"""

from collections.abc import Iterable, Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.base.errors import ConfigError, UserError
from verl_ext.features.feature import RunFeatures
from verl_ext.features.stability import stability_config
from verl_ext.features.table import check_run, read_features
from verl_ext.features.verl_config import key_of, parse_override

OURS = "stability."


def fit_run(config: DictConfig, overrides: Sequence[str], *, read_model: bool) -> RunFeatures:
    """Returns the features that a run switches on and can have.

    Args:
        config: what cannot work is left out of it, in place.
        overrides: the command line.
        read_model: whether checks may read the model's files.

    Raises:
        UserError: something cannot work, and the user wrote it, it is the preset's method (`stability.expects`), or
            no override is known that leaves it out.
    """
    written, tried = _keys(overrides), set[tuple[str, ...]]()
    while True:
        try:
            features = read_features(config, stability_config(config.stability), read_model=read_model)
            if features.demands:
                check_run(features)
            return features
        except UserError as error:
            way = error.gives_way
            if not way or way in tried or any(_is_written(key, written) for key in _keys(way)):
                raise
            method = set(config.stability.get("expects") or {})
            if method & _keys(way):
                fix = tuple(one for one in error.fix if not method & _keys([one]))
                raise ConfigError(error.why, fix, "choose another preset: this one is nothing without it") from error
            tried.add(way)
            _apply(config, way, error.why)


def _keys(overrides: Iterable[str]) -> set[str]:
    return {key_of(override) for override in overrides}


def _is_written(key: str, written: Iterable[str]) -> bool:
    """Returns True if the user wrote this setting of ours, one above it or one below."""
    return key.startswith(OURS) and any(
        other.startswith(OURS) and (f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}."))
        for other in written
    )


def _apply(config: DictConfig, overrides: Sequence[str], why: str) -> None:
    node = config.stability
    with open_dict(config):
        for override in overrides:
            key, value = parse_override(override)
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        node.left_out = {**(node.get("left_out") or {}), " ".join(overrides): why}
