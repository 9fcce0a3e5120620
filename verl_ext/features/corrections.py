"""Corrections: they weigh the loss of a token or a response by its gap.

`stability.correction` names them. Their settings and functions are in core/corrections.py. Most act before the update;
those that need l_theta act in the workers' loss.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.base.methods import ConfiguredMethod
from verl_ext.core.corrections import CORRECTIONS, Correction
from verl_ext.features.feature import Demand, Feature, Idle, Need, RunFeatures, TableLine
from verl_ext.features.losses import LOSS, LOSSES, foreign_loss, loss_has_ratio, loss_mode, reads_k
from verl_ext.features.verl_config import age_problems, bypasses, ignores_weights

# Filters and denominator=kept can leave a mini-batch without a token; verl's own loss would divide 0 by 0.
MASKED = frozenset({Need.MEASURED_BATCHES, Need.OUR_LOSS, Need.LOSS_MASK})
NEEDS_OURS = ("geo_mean",)  # losses of verl that take no weight per token without ours


def needs(run: RunFeatures) -> Iterator[Demand]:
    stability = run.stability
    weighs = {Need.MEASURED_BATCHES, Need.TOKEN_WEIGHTS}
    # The workers run our loss if they can, because verl's geo_mean takes no weight per token. In bypass mode our loss
    # also computes the weights.
    if bypasses(run.config) or not foreign_loss(run.config):
        weighs.add(Need.OUR_LOSS)
    for chosen in stability.before_update:
        off = stability.without(chosen.name) if bypasses(run.config) else ()
        yield Demand(f"stability.correction={chosen.name}", frozenset(weighs), off)
    in_update = frozenset({Need.MEASURED_BATCHES, Need.OUR_LOSS, Need.ROLLOUT_LOG_PROBS})
    for chosen in stability.in_update:
        yield Demand(f"stability.correction={chosen.name}", in_update, stability.without(chosen.name))
    if stability.denominator == "kept":
        yield Demand("stability.denominator=kept", MASKED, off=("stability.denominator=full",))


def problems(run: RunFeatures) -> Iterator[Problem]:
    """Checks that only one method weights the loss by a ratio, and that the loss uses the weight."""
    for chosen in run.stability.in_update:
        if getattr(chosen.settings, "stale_only", False):
            yield from age_problems(
                run.config, f"stability.{chosen.name}.stale_only=true", run.stability.without(chosen.name)
            )
    mode, makes_weights = loss_mode(run.config), reads_k(loss_mode(run.config))
    weighing, ours = [chosen.name for chosen in run.stability.before_update], run.stability.asked_correction
    if mode == "bypass_mode" and run.stability.correction:
        yield Problem(
            f"{ours} cannot weight {LOSS}.loss_mode=bypass_mode, which computes its own weights",
            fix=(off := run.stability.without(*run.stability.correction_names)),
            otherwise="another loss_mode",
            leave_out=off,
        )
        return
    if not (makes_weights or weighing):
        return
    without = run.stability.without(*weighing)
    if makes_weights and weighing:
        yield Problem(f"{LOSS}.loss_mode={mode} and {ours} both weight the loss", fix=without, leave_out=without)
        return
    if ignores_weights(run.config):
        yield Problem(f"{ours} weighs a loss that this distillation does not have", fix=without, leave_out=without)
        return
    if makes_weights:
        ours = f"{LOSS}.loss_mode={mode}"
    verls = OmegaConf.select(run.config, "algorithm.rollout_correction.rollout_is")
    if verls and not bypasses(run.config):  # verl's trainer then computes no weights (`PPOTrainer._compute_advantage`)
        yield Problem(
            f"algorithm.rollout_correction.rollout_is={verls} and {ours} both weight the loss",
            fix=("algorithm.rollout_correction.rollout_is=null",),
            leave_out=() if makes_weights else without,
        )
    if (why := foreign_loss(run.config)) and mode in NEEDS_OURS:
        yield Problem(
            f"{ours} weighs tokens, and {LOSS}.loss_mode={mode} takes weights only from the plugin's loss in the "
            f"workers: {why}",
            fix=without,
            leave_out=without,
        )


def idle(run: RunFeatures) -> Iterator[Idle]:
    """Yields the metrics of corrections, and of losses of the same name, that are not on."""
    before = [chosen.name for chosen in run.stability.before_update]
    if not before:
        yield Idle("correction/*", "no correction acts before the update", ("stability.correction=icepop",))
    for name in CORRECTIONS:
        if name not in before:
            yield Idle(f"correction/{name}/*", f"stability.correction does not name {name} before the update")
    inside = [loss_mode(run.config), *(chosen.name for chosen in run.stability.in_update)]
    for name in {*LOSSES, *CORRECTIONS}:
        if name not in inside:
            yield Idle(f"actor/{name}/*", f"{name} does not act in the update")


def loss_settings(run: RunFeatures) -> dict[str, Any]:
    """Returns the corrections that act in the update: all of them, if it measures the batch."""
    stability = run.stability
    found: dict[str, Any] = {"corrections": {chosen.name: asdict(chosen.settings) for chosen in stability.in_update}}
    if Need.MEASURED_IN_UPDATE in run.needs:
        found["first_pass"] = {
            "corrections": stability.corrections(),
            "narrowed": stability.corrections(narrowed=True),
            "as_mask": bypasses(run.config) and loss_has_ratio(run.config),
            "breakdown": stability.breakdown,
        }
    return found


def lines(run: RunFeatures) -> Iterator[TableLine]:
    stability = run.stability
    for chosen in stability.before_update:
        if Need.MEASURED_IN_UPDATE in run.needs:
            yield _line_in_loss(chosen)
        else:
            yield TableLine("correction", str(chosen), "weights in rollout_is_weights")
    for chosen in stability.in_update:
        yield _line_in_loss(chosen)
    if stability.denominator == "kept":
        yield TableLine("denominator", "kept tokens", "response_mask and loss_mask")


def _line_in_loss(chosen: ConfiguredMethod[Correction]) -> TableLine:
    return TableLine("correction", str(chosen), "{loss}", in_loss=lambda found: chosen.name in found["corrections"])


CORRECTION = Feature(needs, problems, loss_settings=loss_settings, lines=lines, idle=idle)
