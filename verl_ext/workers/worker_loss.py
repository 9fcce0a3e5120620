"""The loss function of the training workers: verl's `ppo_loss`, with the tensors that its signature does not pass.

Written for verl 0.9.1, where `TrainingWorker.set_loss_fn` takes a function (model_output, data, dp_group) of one
micro-batch. Everything verl computes is still computed by `ppo_loss`.

Shape legend: B trajectories of the micro-batch, T response tokens (padded).
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from verl_ext.base.methods import ConfiguredMethod, build, choose
from verl_ext.base.names import (
    ADVANTAGES,
    AGREEMENT,
    ANSWER_FACTS,
    FILTER_SCALE,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    RESPONSE_MASK,
    ROUTER_SUMS,
    WEIGHTS,
)
from verl_ext.core.corrections import CORRECTIONS, Correction, check_range
from verl_ext.core.loss_batch import FIELDS, LossBatch, call_method
from verl_ext.core.losses import clip_sides, unbiased_kl
from verl_ext.core.mismatch import mismatch_ratio
from verl_ext.core.tokens import row_matrix
from verl_ext.features.losses import UNBIASED
from verl_ext.features.settings import MiniBatchLimits
from verl_ext.workers.first_pass import FirstPass, FirstPassSettings
from verl_ext.workers.gate import Gate
from verl_ext.workers.loss_config import ComposedLossConfig, build_loss_config
from verl_ext.workers.losses import WEIGHTED, provide, register_losses
from verl_ext.workers.top_tokens import CENTERING, TopTokenUse
from verl_ext.workers.undo import keep_updates_of

VERLS_FIELDS = (OLD_LOG_PROBS, REF_LOG_PROBS, ADVANTAGES, WEIGHTS)  # [B, r], each if the batch has it
VERLS_OWN = ("_target_", "rollout_correction")  # fields of a PolicyLossConfig that are not settings of the loss


@dataclass(frozen=True)
class LossSettings:
    """The trainer's settings of the workers' loss.

    Attributes:
        corrections: the corrections that act in each update step.
        policy_loss: fields of the policy loss, `loss_mode` among them; None keeps actor.policy_loss.
        kl_denominator: the policy that actor.kl_loss_type=unbiased assumes sampled the tokens: "infer", the rollout
            engine, or "old", the training engine before the update.
        mini_batch: which optimizer steps to refuse.
        first_pass: the measurements and weights of a run without compute_log_prob; None if it runs.
        top_tokens: the use of the sampler's top tokens; None if the rollout returns none.
        reuses: where a batch has no l_old, it is l_theta.
        undo: keep what an update changes, so that it can be taken back.
        after_update: trajectories of a batch to score again after its update.
        float32_head: compute the logits in float32.
    """

    corrections: tuple[ConfiguredMethod[Correction], ...] = ()
    policy_loss: Mapping[str, Any] | None = None
    kl_denominator: str = "infer"
    mini_batch: MiniBatchLimits = field(default_factory=MiniBatchLimits)
    first_pass: FirstPassSettings | None = None
    top_tokens: TopTokenUse | None = None
    reuses: bool = False
    undo: bool = False
    after_update: int = 0
    float32_head: bool = False

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "LossSettings":
        """Builds the settings from `table.loss_settings`, the form that is sent to a worker: {"corrections": {"opsm":
        {"delta": 0.1}}, "mini_batch": {...}, ...}."""
        corrections = settings.get("corrections", {}).items()
        chosen = tuple(choose(CORRECTIONS[name], given, f"stability.{name}") for name, given in corrections)
        limits = build(MiniBatchLimits, settings.get("mini_batch"), "stability.guard.mini_batch")
        own: dict[str, Any] = {"corrections": chosen, "mini_batch": limits}
        if (first_pass := settings.get("first_pass")) is not None:
            own["first_pass"] = FirstPassSettings(**first_pass)
        if (top_tokens := settings.get("top_tokens")) is not None:
            own["top_tokens"] = TopTokenUse(**top_tokens)
        return cls(**{**settings, **own})


def install_loss(gate: Gate, config: ActorConfig, settings: LossSettings) -> dict[str, Any]:
    """Installs the settings' loss in the gate's worker, and the gate's own settings in the gate.

    It may be called again. After an error the installed loss stays.

    Args:
        config: the worker's ActorConfig, which is not changed.

    Returns the active settings: see `build_worker_loss`; `undo`, whether an update can be taken back; `after_update`,
    trajectories scored again.

    Raises:
        ConfigError: see `build_worker_loss`.
    """
    first_pass = FirstPass(settings.first_pass) if settings.first_pass is not None else None
    loss, active = build_worker_loss(config, settings, gate, first_pass)
    gate.limits, gate.first_pass, gate.after_update = settings.mini_batch, first_pass, settings.after_update
    gate.undo = (gate.undo or keep_updates_of(gate.engine)) if settings.undo else None
    gate.worker.set_loss_fn(loss)
    return active | {"undo": settings.undo, "after_update": settings.after_update}


def build_worker_loss(
    config: ActorConfig, settings: LossSettings, gate: Gate | None = None, first_pass: FirstPass | None = None
) -> tuple[partial, dict[str, Any]]:
    """Builds the loss function for `TrainingWorker.set_loss_fn`.

    Args:
        config: the worker's ActorConfig, which is not changed.
        gate: observes every micro-batch.
        first_pass: built from settings.first_pass; weighs every micro-batch.

    Returns the function and {"policy_loss": its settings, "corrections": name -> settings, "kl": the estimator or None,
    "mini_batch": the limits that are set, "first_pass": whether it measures, "reuses": whether l_theta may be l_old,
    "centers": whether it centers scores}.

    Raises:
        ConfigError: a setting of the policy loss cannot work.
    """
    register_losses()  # including those of stability.plugins
    policy_loss = config.policy_loss if settings.policy_loss is None else build_loss_config(**settings.policy_loss)
    unbiased = config.use_kl_loss and config.kl_loss_type == UNBIASED
    # In the first update, verl's kl_penalty would refuse a name that it does not know.
    weighted = _replace_fields(policy_loss, loss_mode=WEIGHTED.get(policy_loss.loss_mode, policy_loss.loss_mode))
    ours = _replace_fields(config, policy_loss=weighted, **({"use_kl_loss": False} if unbiased else {}))
    loss = partial(
        worker_loss,
        config=ours,
        corrections=settings.corrections,
        kl_denominator=settings.kl_denominator if unbiased else None,
        gate=gate,
        first_pass=first_pass,
        reuses=settings.reuses,
        centers=settings.top_tokens is not None and settings.top_tokens.centers,
    )
    before = {} if settings.first_pass is None else settings.first_pass.corrections
    kl = f"{UNBIASED}, over l_{settings.kl_denominator}" if unbiased else config.kl_loss_type
    return loss, {
        "policy_loss": _flat_settings(policy_loss),
        "corrections": {**before, **{chosen.name: asdict(chosen.settings) for chosen in settings.corrections}},
        "kl": kl if config.use_kl_loss else None,
        "mini_batch": {name: limit for name, limit in asdict(settings.mini_batch).items() if limit is not None},
        "first_pass": first_pass is not None,
        "reuses": settings.reuses,
        "centers": loss.keywords["centers"],
    }


def _flat_settings(policy_loss: PolicyLossConfig) -> dict[str, Any]:
    """Returns a policy loss's settings as a flat mapping."""
    found = {name: policy_loss[name] for name in policy_loss if name not in VERLS_OWN}
    if isinstance(policy_loss, ComposedLossConfig):
        found |= asdict(found.pop("settings"))
    return found


def _replace_fields(config: Any, **values: Any) -> Any:
    """Returns a shallow copy of one of verl's frozen configs; dataclasses.replace would run its __post_init__ again."""
    changed = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed


def worker_loss(
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    config: ActorConfig,
    corrections: tuple[ConfiguredMethod[Correction], ...],
    kl_denominator: str | None,
    gate: Gate | None,
    first_pass: FirstPass | None,
    reuses: bool,
    centers: bool,
) -> tuple[Tensor, dict[str, Any]]:
    """Computes verl's `ppo_loss` of one micro-batch, with `current_batch()` for its policy loss, our weights, and our
    terms: the unbiased KL, and the centering of the score.

    A mini-batch without a token to learn from (batch_num_tokens 0) has loss 0, zero gradients and, by the gate, no
    optimizer step; verl alone divides 0 by 0. If filters dropped whole trajectories, the configured number by which
    sequence means divide is reduced to the share that is left (`filter_scale`). Half-precision log-probabilities are
    converted to float32; values outside the response mask are not used.

    Args:
        model_output: `log_probs` nested [B, prompt + response], `entropy` or none; if scores are centered, each token's
            term of `core.top_tokens.centering`; if routers are compared in the update, `routing_outputs`.
        data: the micro-batch, jagged [B, r] fields; `core.loss_batch.FIELDS` names those that are read in addition to
            verl's.

    Returns the scalar loss, and verl's metrics with actor/<correction>/*, kl_loss, kl_coef, filter_scale,
    actor/score_centering and, of PPO's clip, those of `clip_sides`.

    Raises:
        ConfigError: the batch lacks a field that a feature reads.
        MethodError: a correction or a policy loss returned something that cannot be used.
    """
    model_output = {**model_output, "log_probs": model_output["log_probs"].float()}
    data, metrics = _padded_copy(data)
    l_theta = no_padding_2_padding(model_output["log_probs"], data)
    if reuses and OLD_LOG_PROBS not in data.keys():  # noqa: SIM118 (a TensorDict has no `in`)
        data[OLD_LOG_PROBS] = torch.where(data[RESPONSE_MASK].bool(), l_theta.detach(), 0)
    if AGREEMENT in model_output:
        agreement = model_output[AGREEMENT].to_padded_tensor(0.0)
        data[AGREEMENT] = torch.where(data[RESPONSE_MASK].bool(), agreement, 0)
    batch = _read_batch(l_theta, data)
    if gate is not None:
        gate.observe(batch)
    if first_pass is not None and first_pass.measures:
        entropy = model_output.get("entropy")
        entropy = None if entropy is None else no_padding_2_padding(entropy.detach().float(), data)
        facts = data.get(ANSWER_FACTS, None)
        facts = None if facts is None else row_matrix(facts)
        weight = first_pass.weigh(batch, entropy, model_output.get(ROUTER_SUMS), facts)
        if weight is not None:
            data[WEIGHTS] = weight
    for chosen in corrections:
        found = call_method(chosen, batch, gives=("weight",))
        if found.weight is not None:
            _check_weight(chosen.name, found.weight, batch)
            data[WEIGHTS] = found.weight * data.get(WEIGHTS, 1)
        shares = {f"actor/{chosen.name}/{metric}": value for metric, value in found.metrics.items()}
        metrics |= Metric.from_dict(shares, aggregation=AggregationType.MEAN)
    with provide(batch):
        loss, verl_metrics = ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    metrics |= verl_metrics
    if _clips_tokens(config.policy_loss):
        usual = config.clip_ratio
        low, high = (usual if own is None else own for own in (config.clip_ratio_low, config.clip_ratio_high))
        metrics |= Metric.from_dict(clip_sides(batch, low, high), aggregation=AggregationType.MEAN)
    mean = partial(agg_loss, loss_mask=batch.mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info)
    if centers:
        term = mean(loss_mat=batch.advantages * no_padding_2_padding(model_output[CENTERING], data))
        loss = loss + term
        metrics["actor/score_centering"] = Metric(value=term, aggregation=verl_metrics["actor/pg_loss"].aggregation)
    if kl_denominator is not None:
        sampled = batch.require("l_infer") if kl_denominator == "infer" else batch.l_old
        term = mean(loss_mat=unbiased_kl(batch.l_theta, data[REF_LOG_PROBS], sampled, batch.mask))
        loss = loss + config.kl_loss_coef * term
        metrics["kl_loss"] = Metric(value=term, aggregation=verl_metrics["actor/pg_loss"].aggregation)
        metrics["kl_coef"] = config.kl_loss_coef
    return loss, metrics


def _check_weight(name: str, weight: Tensor, batch: LossBatch) -> None:
    """Refuses weights of a correction that are not finite or are negative, at tokens whose log-probabilities are
    finite; on a CPU only, because a GPU would have to be waited for."""
    if weight.device.type != "cpu":
        return
    read = [each for each in (batch.l_theta, batch.l_old, batch.l_infer) if each is not None]
    judged = batch.mask & torch.stack(read).isfinite().all(dim=0)
    if judged.any():
        check_range(name, *(bound.item() for bound in weight[judged].aminmax()))


def _clips_tokens(policy_loss: PolicyLossConfig) -> bool:
    """Returns whether the loss is PPO's, whose clip bounds a token's own ratio."""
    composed = isinstance(policy_loss, ComposedLossConfig)
    return (policy_loss.base if composed else policy_loss.loss_mode) == "vanilla"


def _padded_copy(data: TensorDict) -> tuple[TensorDict, dict[str, Any]]:
    """Returns a micro-batch whose losses can be computed, and its metrics; the engine's own is not changed.

    The fields that losses read are padded to [B, T], and 0 where the mask is 0: verl masks by multiplying, or by
    torch.where on the result, so a NaN that the rollout returned for a tool's token would reach the loss with the
    former, and the gradient with both. For batch_num_tokens and global_batch_size see `worker_loss`.
    """
    read = data.select(RESPONSE_MASK, *VERLS_FIELDS, *FIELDS.values(), strict=False).to_padded_tensor()
    mask = read[RESPONSE_MASK].bool()
    padded = read.apply(lambda values: torch.where(mask, values, 0))
    # `clone` would copy the fields without numbers row by row.
    data = TensorDict(dict(data.items()) | dict(padded.items()), batch_size=data.batch_size)
    if data["batch_num_tokens"] == 0:
        tu.assign_non_tensor(data, batch_num_tokens=1)
    scale = tu.get_non_tensor_data(data, FILTER_SCALE, default=1.0)
    if scale == 1 or data["global_batch_size"] is None:
        return data, {}
    tu.assign_non_tensor(data, global_batch_size=data["global_batch_size"] / scale)
    return data, {FILTER_SCALE: scale}


def _read_batch(l_theta: Tensor, data: TensorDict) -> LossBatch:
    """Returns the micro-batch of methods, of the model's log-probabilities [B, T], and `_padded_copy`'s data."""
    mask, l_old = data[RESPONSE_MASK].bool(), data[OLD_LOG_PROBS]
    inputs = {name: data[field] for name, field in FIELDS.items() if field in data.keys()}  # noqa: SIM118
    if "k" in inputs:
        k = mismatch_ratio(inputs["l_infer"], l_old).nan_to_num_(0.0, 0.0, 0.0)
        inputs["k"] = k * mask
    return LossBatch(l_theta, l_old, data[ADVANTAGES], mask, **inputs)
