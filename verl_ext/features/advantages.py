"""Registers the advantage estimators of `verl_ext.core.advantages` with verl, whose signature they get here.

    algorithm.adv_estimator=qae            +algorithm.qae.k=0.4
    algorithm.adv_estimator=grpo_positive  +algorithm.grpo_positive.negative_scale=0.0

Shape legend: B rows of a batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_ext.base.errors import Problem
from verl_ext.base.methods import ConfiguredMethod, Method, build
from verl_ext.core.advantages import ESTIMATORS, advantages_of_rows
from verl_ext.features.feature import IN_THE_STEP, Demand, Feature, RunFeatures, TableLine

if TYPE_CHECKING:
    from torch import Tensor

# The trajectory ids of the batch, and whether the guard has refused it.
_estimator_batch: ContextVar[tuple[Sequence[str] | None, bool]] = ContextVar("estimator_batch", default=(None, False))


def estimator_settings(method: Method, algorithm: Any) -> Any:
    """Returns the validated settings of an estimator; `algorithm` is verl's node, or None for the defaults.

    Raises:
        ConfigError: a setting is unknown, not a number or out of range.
    """
    given = algorithm.get(method.name, None) if algorithm is not None else None
    return build(method.settings, given, f"algorithm.{method.name}")


def needs(run: RunFeatures) -> Iterator[Demand]:
    if (name := run.config.algorithm.adv_estimator) in ESTIMATORS:
        yield Demand(f"algorithm.adv_estimator={name}")


def lines(run: RunFeatures) -> Iterator[TableLine]:
    if (method := ESTIMATORS.get(run.config.algorithm.adv_estimator)) is not None:
        chosen = ConfiguredMethod(method, estimator_settings(method, run.config.algorithm))
        yield TableLine("advantages", str(chosen), IN_THE_STEP)


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks the estimator's settings; refuses settings of estimators that are not chosen."""
    algorithm = run.config.algorithm
    if (method := ESTIMATORS.get(algorithm.adv_estimator)) is not None:
        estimator_settings(method, algorithm)
    for name in ESTIMATORS:
        if name != algorithm.adv_estimator and algorithm.get(name):
            yield Problem(
                f"algorithm.{name} is set, and algorithm.adv_estimator={algorithm.adv_estimator} does not use it",
                fix=(f"algorithm.adv_estimator={name}",),
                otherwise="leave it out",
            )


ESTIMATOR = Feature(needs, problems, lines=lines)


@contextmanager
def session_keys(keys: Sequence[str], *, refused: bool = False) -> Iterator[None]:
    """Passes the session of each row to the estimators, while verl computes advantages.

    A session can have several outputs, each a row. verl handles that only in its own GRPO
    (`compute_advantage_for_multi_trajectories` in trainer/ppo/v1/utils.py) and passes an estimator only the uids. In
    this context our estimators do the same: a session's final reward counts once in its group, and its advantage goes
    to all of the session's rows.

    Args:
        keys: [B] trajectory ids `{uid}_{session}_{index}`, in the order of the rows.
        refused: the batch makes no update. A reward that is not finite is then no error: it may be the reason.
    """
    token = _estimator_batch.set((tuple(keys), refused))
    try:
        yield
    finally:
        _estimator_batch.reset(token)


def estimate(
    method: Method,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[object],
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Computes advantages with a registered estimator and the settings of `algorithm.NAME`.

    Advantages are divided by the group's standard deviation, as in the papers, unless
    `algorithm.norm_adv_by_std_in_grpo=false`. Under plain verl, without `session_keys`, every row counts as a session:
    an agent loop's several outputs then count several times in their group.

    Args:
        token_level_rewards, response_mask: [B, T], as verl passes them; a row's reward is the sum over its tokens.
        index: [B] uids; rows of the same uid form a group.
        config: verl's `algorithm` node, or None for the defaults.

    Returns advantages and returns, the same [B, T] tensor: constant over a row's generated tokens, 0 elsewhere. All are
    NaN if the batch is refused and has a reward that is NaN or infinite.

    Raises:
        BatchError: a reward is NaN or infinite, and the batch is not refused; or the keys of `session_keys` do not fit
            the batch.
        ConfigError: a setting of `algorithm.NAME` is not valid.
    """
    norm_by_std = config is None or bool(config.get("norm_adv_by_std_in_grpo", True))
    settings = asdict(estimator_settings(method, config))
    estimator = partial(method.function, norm_by_std=norm_by_std, **settings)
    rewards_B = token_level_rewards.double().sum(dim=-1)
    keys, refused = _estimator_batch.get()
    if refused and not rewards_B.isfinite().all():
        advantages_B = rewards_B * float("nan")
    else:
        advantages_B = advantages_of_rows(estimator, rewards_B, index, keys)
    advantages = advantages_B.to(token_level_rewards.dtype).unsqueeze(-1) * response_mask
    return advantages, advantages


def register_estimators() -> None:
    """Registers our estimators with verl. It is called again after a plugin has added more."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name, method in ESTIMATORS.items():
        if name not in ADV_ESTIMATOR_REGISTRY:
            register_adv_est(name)(partial(estimate, method))
