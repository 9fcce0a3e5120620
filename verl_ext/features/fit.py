"""Fits a preset to a run: leaves out what this engine, trainer mode or model cannot do, and keeps the reason.

A problem has the overrides that leave out what cannot work (`Problem.leave_out`). If a preset, a recipe or a config
file asked for that, they are applied, and `stability.left_out` keeps the reason for the start-up table. If the user
wrote it on the command line, the run is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.base.errors import ConfigError, Problem, UserError, errors_of
from verl_ext.features.feature import RunFeatures
from verl_ext.features.stability import stability_config
from verl_ext.features.table import problems_of, read_features
from verl_ext.features.verl_config import key_of, parse_override

MEASURED = "actor_rollout_ref.rollout.calculate_log_probs"  # what all features need, whatever the user wrote


class Fit(NamedTuple):
    """What a run switches on, and what cannot work.

    Attributes:
        features: None if the settings cannot be parsed.
        problems: what the user has to change.
    """

    features: RunFeatures | None
    problems: list[Problem]


def fit_run(config: DictConfig, overrides: Sequence[str], *, read_model: bool) -> RunFeatures:
    """Returns the features that a run switches on and can have; takes the arguments of `fit`.

    Raises:
        ConfigError: settings cannot work; it has all of them.
    """
    features, problems = fit(config, overrides, read_model=read_model)
    if (errors := errors_of(problems)) or features is None:
        raise ConfigError.of(errors)
    return features


def fit(config: DictConfig, overrides: Sequence[str], *, read_model: bool) -> Fit:
    """Returns the features that a run switches on, and its problems: settings that cannot work, although the user
    wrote them, or they are the preset's method (`stability.expects`), or no override leaves them out.

    Args:
        config: changed in place: what cannot work is left out.
        overrides: the command line.
        read_model: whether rules may read the model's files.
    """
    written, tried = _keys(overrides), set[tuple[str, ...]]()
    while True:
        features, problems = _fitting(config, read_model)
        expects = config.stability.get("expects")
        method = {str(setting) for setting in expects} if OmegaConf.is_dict(expects) else set[str]()
        fitting = [one for one in problems if _gives_way(one, written) and one.leave_out not in tried]
        given_up = next((one for one in fitting if not method & _keys(one.leave_out)), None)
        if given_up is None:
            return Fit(features, [_of_method(one, method) if one in fitting else one for one in problems])
        tried.add(given_up.leave_out)
        _apply(config, given_up.leave_out, given_up.found)


def _fitting(config: DictConfig, read_model: bool) -> Fit:
    try:
        features = read_features(config, stability_config(config.stability), read_model=read_model)
    except UserError as error:
        return Fit(None, [*error.problems])
    return Fit(features, problems_of(features))


def _gives_way(problem: Problem, written: Iterable[str]) -> bool:
    return bool(problem.leave_out) and not any(_is_written(key, written) for key in _keys(problem.leave_out))


def _of_method(problem: Problem, method: set[str]) -> Problem:
    """Returns a preset's problem whose remedy would leave out the preset's own method."""
    fix = tuple(one for one in problem.fix if not method & _keys([one]))
    return replace(problem, fix=fix, otherwise="choose another preset: this setting is its method")


def _keys(overrides: Iterable[str]) -> set[str]:
    return {key_of(override) for override in overrides}


def _is_written(key: str, written: Iterable[str]) -> bool:
    """Returns True if the user wrote this setting, one that contains it, or one inside it."""
    return key != MEASURED and any(
        "." in other and (f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")) for other in written
    )


def _apply(config: DictConfig, overrides: Sequence[str], why: str) -> None:
    node = config.stability
    with open_dict(config):
        for override in overrides:
            key, value = parse_override(override)
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        node.left_out = {**(node.get("left_out") or {}), " ".join(overrides): why}
