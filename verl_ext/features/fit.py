"""Fits a preset to a run: leaves out what this engine, trainer mode or model cannot do, and keeps the reason.

A check that refuses a setting knows which overrides leave it out (`UserError.fallback`). If the setting comes from a
preset, a recipe or a config file, these overrides are applied, and `stability.left_out` keeps the reason for the
start-up table. If the user wrote it under `stability.` on the command line, the run is refused.
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
        config: changed in place: what cannot work is left out.
        overrides: the command line.
        read_model: whether checks may read the model's files.

    Raises:
        UserError: a setting cannot work, and the user wrote it, or it is the preset's method (`stability.expects`), or
            no override leaves it out.
    """
    written, tried = _keys(overrides), set[tuple[str, ...]]()
    while True:
        try:
            features = read_features(config, stability_config(config.stability), read_model=read_model)
            if features.demands:
                check_run(features)
            return features
        except UserError as error:
            way = error.fallback
            if not way or way in tried or any(_is_written(key, written) for key in _keys(way)):
                raise
            method = set(config.stability.get("expects") or {})
            if method & _keys(way):
                fix = tuple(one for one in error.fix if not method & _keys([one]))
                raise ConfigError(error.why, fix, "choose another preset: this setting is its method") from error
            tried.add(way)
            _apply(config, way, error.why)


def _keys(overrides: Iterable[str]) -> set[str]:
    return {key_of(override) for override in overrides}


def _is_written(key: str, written: Iterable[str]) -> bool:
    """Returns True if the user wrote this setting of ours, one that contains it, or one inside it."""
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
