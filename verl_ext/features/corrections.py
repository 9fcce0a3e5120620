"""Corrections: weights on the loss of a token, or a response, by its gap.

`stability.correction` names them, and their settings are next to their functions (core/corrections.py). Most act before
the update; those that need l_theta act in the workers' loss.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import Chosen
from verl_ext.features.feature import Feature, Part, RunFeatures, TableLine
from verl_ext.features.losses import LOSS, foreign_loss, loss_has_ratio, loss_mode, reads_k
from verl_ext.features.verl_config import bypasses, ignores_weights

# Filters and denominator=kept can leave a mini-batch without a token, for which verl's own loss divides 0 by 0.
MASKED = frozenset({Part.MEASURE, Part.LOSS, Part.MASKS})
NEEDS_OURS = ("geo_mean",)  # losses of verl that cannot take a weight per token by themselves


def check(run: RunFeatures) -> None:
    """Checks that only one method weights the loss by a ratio, and that the loss uses the weight."""
    mode, makes_weights = loss_mode(run.config), reads_k(loss_mode(run.config))
    weighing = [chosen.name for chosen in run.stability.before_update]
    if not (makes_weights or weighing):
        return
    ours, without = run.stability.asked_correction, run.stability.without(*weighing)
    if makes_weights and weighing:
        raise ConfigError(f"{LOSS}.loss_mode={mode} and {ours} both weight the loss", fix=without, gives_way=without)
    if ignores_weights(run.config):
        raise ConfigError(f"{ours} weighs a loss that this distillation does not have", fix=without, gives_way=without)
    if makes_weights:
        ours = f"{LOSS}.loss_mode={mode}"
    if verls := OmegaConf.select(run.config, "algorithm.rollout_correction.rollout_is"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={verls} and {ours} both weight the loss",
            fix=("algorithm.rollout_correction.rollout_is=null",),
            gives_way=() if makes_weights else without,
        )
    if mode == "bypass_mode":
        raise ConfigError(
            f"{ours} cannot weight {LOSS}.loss_mode=bypass_mode, which computes its own weights",
            fix=run.stability.without(*run.stability.correction_names),
            otherwise="another loss_mode",
            gives_way=without,
        )
    if (why := foreign_loss(run.config)) and mode in NEEDS_OURS:
        raise ConfigError(
            f"{ours} weighs tokens, which {LOSS}.loss_mode={mode} takes only from the plugin's loss in the workers: "
            f"{why}",
            fix=without,
            gives_way=without,
        )


def loss_settings(run: RunFeatures) -> dict[str, Any]:
    """Returns the corrections that act in the update; in bypass mode, all of them do."""
    stability = run.stability
    found: dict[str, Any] = {"corrections": {chosen.name: asdict(chosen.settings) for chosen in stability.in_update}}
    if run.uses(Part.MEASURE_IN_UPDATE):
        found["first_pass"] = {
            "corrections": stability.corrections(),
            "narrowed": stability.corrections(tightened=True),
            "as_mask": loss_has_ratio(run.config),
            "breakdown": stability.breakdown,
        }
    return found


def lines(run: RunFeatures) -> Iterator[TableLine]:
    stability, late = run.stability, bypasses(run.config)
    # The workers run our loss here as well, if they can: verl's geo_mean takes no weight per token.
    weighs = frozenset({Part.MEASURE, Part.WEIGHTS} | ({Part.LOSS} if not foreign_loss(run.config) else set()))
    for chosen in stability.before_update:
        if late:
            yield _in_loss(chosen, weighs | {Part.LOSS}, stability.without(chosen.name))
        else:
            yield TableLine("correction", str(chosen), "weights in rollout_is_weights", weighs)
    for chosen in stability.in_update:
        parts = frozenset({Part.MEASURE, Part.LOSS, Part.LOG_PROBS})
        yield _in_loss(chosen, parts, stability.without(chosen.name))
    if stability.denominator == "kept":
        off = ("stability.denominator=full",)
        yield TableLine("denominator", "kept tokens", "response_mask and loss_mask", MASKED, off=off)


def _in_loss(chosen: Chosen, parts: frozenset[Part], off: tuple[str, ...]) -> TableLine:
    return TableLine("correction", str(chosen), "{loss}", parts, lambda found: chosen.name in found["corrections"], off)


CORRECTION = Feature(lines, check, loss_settings=loss_settings)
