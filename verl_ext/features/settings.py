"""The settings of the `stability` node, as frozen dataclasses that validate themselves.

Their defaults are only here; a method's settings are next to its function in `core`. `features.stability` reads the
node. `python tools/pages.py` writes them into docs/settings.md.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from verl_ext.base.errors import ConfigError, Problem
from verl_ext.base.methods import ConfiguredMethod, defaults, described, require, require_one_of
from verl_ext.base.metrics import OURS, find, nearest
from verl_ext.base.names import FEWEST_PROMPTS
from verl_ext.core.corrections import CORRECTIONS, Correction
from verl_ext.core.filters import BatchFilter
from verl_ext.features.verl_config import REPLAY_MODES
from verl_ext.guard.rules import LowerLr, Rule
from verl_ext.guard.state import Boundary

GUARD_NODE = "stability.guard"
BATCH_SKIP = "batch_skip"  # the name of the rule that stability.batch_skip adds
SKIP_METRICS = ("vllm_kl/k1", "vllm_kl/k3", "vllm_kl/head")
# Setting of the guard -> the actions that read it.
READ_BY = {
    "tighten_factor": ("tighten",),
    "lower_lr": ("lower_lr",),
    "max_rollbacks": ("rollback",),
    "rollback_cooldown": ("rollback", "undo"),
}
KL_DENOMINATORS = ("infer", "old")
AGREEMENT = "stability.router_agreement=true"
EVERY_AGREEMENT = "stability.router_agreement_share=1"
NONE = "none"
FORMATS = (NONE, "fp8", "int8", "int4", "fp4")
GROUPS = ("tensor", "channel")


@dataclass(frozen=True)
class BatchSkip:
    """Skips the update of a batch when `metric` passes `threshold`.

    Attributes:
        metric: the metric that is compared: `vllm_kl/k3`, `vllm_kl/k1`, or `vllm_kl/head`, which needs
            `stability.top_tokens.k`.
        threshold: skip the update of a batch whose metric is above this. Weights, optimizer and learning-rate schedule
            stay as they are, and training continues. null never skips.
    """

    metric: str = "vllm_kl/k3"
    threshold: float | None = None

    def __post_init__(self) -> None:
        require_one_of(self, "metric", SKIP_METRICS)
        holds = self.threshold is None or self.threshold >= 0
        require(self, "threshold", holds, "must be at least 0, or null to never skip")


@dataclass(frozen=True)
class MiniBatchLimits:
    """Refuses the optimizer step of a mini-batch that is past a bound; null sets no bound.

    Attributes:
        vllm_kl: refuse the optimizer step of a mini-batch whose k3 of l_infer against l_theta is above this. l_theta is
            the policy at this mini-batch.
        policy_kl: refuse the optimizer step if k3 of l_old against l_theta is above this. It measures how far the
            step's earlier mini-batches have moved the policy.
        grad_norm: refuse the optimizer step if the gradient's norm before clipping is above this (FSDP2, Megatron, and
            VeOmni without expert parallelism).
    """

    vllm_kl: float | None = None
    policy_kl: float | None = None
    grad_norm: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(self, name, value is None or 0 < value < math.inf, "must be above 0 and finite, or null")

    @property
    def limits(self) -> dict[str, float]:
        """The bounds that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def active(self) -> bool:
        return bool(self.limits)


@dataclass(frozen=True)
class AfterUpdate:
    """Scores trajectories of a batch again after its update, so that a rule can undo the update.

    Attributes:
        trajectories: how many trajectories of a batch are scored again after its update, for `actor/after_update/*`.
            Each costs a forward pass. For FSDP2, Megatron, and VeOmni without expert parallelism. 0 scores none.
    """

    trajectories: int = 0

    def __post_init__(self) -> None:
        require(self, "trajectories", self.trajectories >= 0, "must be a number of trajectories, or 0")


def check_signal(where: str, signal: str) -> None:
    """Refuses a signal that neither this package nor verl logs, unless it may be a metric of the user's own."""
    if find(signal) is not None:
        return
    near = nearest(signal)
    if near or signal.startswith(OURS):
        raise ConfigError(
            f"{where}.signal={signal} is not known; similar names: {', '.join(near) or 'none'}. A metric of your own "
            f"needs a name unlike these, and without the prefixes {', '.join(OURS)}: mine/NAME, for example"
        )


@dataclass(frozen=True)
class GuardSettings:
    """Rules, their actions and the mini-batch gate are explained in docs/guard.md.

    Attributes:
        stop_after: stop the run after this many steps in a row without an update; null never stops it.
        slow_step_s: report a step that takes longer than this many seconds and three times as long as the median
            step, with the way to find out what it waits for. null never reports it.
        tighten_factor: narrow IcePop's band by this factor, in logarithms, while a rule with `action: tighten` fires.
        max_rollbacks: after this many rollbacks, the next one stops the run instead.
        rollback_cooldown: for this many steps after a rollback, another rollback only skips the update. The same holds
            after an undo of weights that the rollout has had.
        lower_lr: what rules with `action: lower_lr` do to the learning rate.
        after_update: score a few trajectories of each batch again after its update.
        level: warn if the engines' k3 stays above this. null takes the published level of the model and the rollout's
            format, or else twice the mean of the run's first 20 readings (docs/guard.md#normal-levels). 0 never warns.
        mini_batch: refuse single optimizer steps, in the workers.
        boundary: the signal that the forecast extrapolates, and the value to which it counts down.
    """

    stop_after: int | None = 10
    slow_step_s: float | None = 600.0
    tighten_factor: float = 0.5
    max_rollbacks: int = 3
    rollback_cooldown: int = 5
    lower_lr: LowerLr = field(default_factory=LowerLr)
    after_update: AfterUpdate = field(default_factory=AfterUpdate)
    level: float | None = None
    mini_batch: MiniBatchLimits = field(default_factory=MiniBatchLimits)
    boundary: Boundary = field(default_factory=Boundary)

    def __post_init__(self) -> None:
        holds = self.stop_after is None or self.stop_after >= 1
        require(self, "stop_after", holds, "must be at least 1, or null to never stop")
        holds = self.slow_step_s is None or self.slow_step_s > 0
        require(self, "slow_step_s", holds, "must be above 0 seconds, or null to never report")
        require(self, "tighten_factor", 0 < self.tighten_factor < 1, "must be between 0 and 1")
        for name in ("max_rollbacks", "rollback_cooldown"):
            require(self, name, getattr(self, name) >= 0, "must be at least 0")
        holds = self.level is None or 0 <= self.level < math.inf
        require(self, "level", holds, "must be at least 0 and finite, or null for the published level or the run's own")
        check_signal(f"{GUARD_NODE}.boundary", self.boundary.signal)


@dataclass(frozen=True)
class TopTokenSettings:
    """The most likely tokens that the rollout returns at each place.

    Attributes:
        k: how many of its most likely tokens the rollout returns at each place, with their log-probabilities, 8 bytes
            each. Sets vLLM's `max_logprobs`. With 0, a feature that needs top tokens sets the number: truncated
            sampling (`top_k`) or score centering (128). More in docs/methods.md#top-tokens.
    """

    k: int = 0

    def __post_init__(self) -> None:
        require(self, "k", self.k >= 0, "must be a number of tokens, or 0")


@dataclass(frozen=True)
class Rescoring:
    """Rescoring is for `separate_async`, where a batch may have no trajectory of the policy's own weights.

    A few trajectories are scored again with the weights that sampled them. This separates the engines' part of the gap
    from the policy's own movement (docs/reading-metrics.md#old-rollouts).

    The cost: verl copies the weights to the host at the start of every step of `separate_async`. The versions are the
    copies of earlier steps, kept in addition to that of the present one; each rank keeps its shard (the bytes of the
    parameters, no optimizer). A step that rescores copies the current weights once more and loads each version that it
    needs. It computes log-probabilities of that version's trajectories, and of a few others so that every rank has
    equally many (one trajectory per pass). Then it loads the current weights again. The time is logged as
    `timing_s/rescore`.

    Trajectories that are older than the kept versions are not rescored. Where several versions sampled a trajectory,
    the tokens of the newest are compared. The other modes and bypass mode keep no copies, so rescoring is refused
    there.

    Attributes:
        every: rescore every this many steps; 0 never does.
        trajectories: how many trajectories of a batch are rescored, chosen at random from those whose newest version
            is kept.
        versions: how many old versions of the weights are kept in the host's memory.
    """

    every: int = 0
    trajectories: int = 16
    versions: int = 1

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be a number of steps, or 0 for never")
        for name in ("trajectories", "versions"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")

    def __str__(self) -> str:
        often = "per step" if self.every == 1 else f"every {self.every} steps"
        return f"{self.trajectories} trajectories {often}; copies of the weights in the host's memory: {self.versions}"


@dataclass(frozen=True)
class TrajectoryDump:
    """Writes a few trajectories per step, token by token, for the report (docs/report.md#trajectories).

    Attributes:
        per_step: how many trajectories are written per step. Half of them (rounded up) have the largest mean |log k|,
            the others are chosen at random. 0 writes none; any other number turns `vllm_kl/*` on.
        every: write every this many steps.
        max_tokens: how many tokens of a response are written. A longer response loses its middle.
        max_megabytes: the size on disk, in two files. Above it, the older file is deleted; the newest half is always
            kept.
    """

    per_step: int = 0
    every: int = 1
    max_tokens: int = 4096
    max_megabytes: float = 200.0

    def __post_init__(self) -> None:
        for name, least in (("per_step", 0), ("every", 1), ("max_tokens", 2)):
            require(self, name, getattr(self, name) >= least, f"must be at least {least}")
        require(self, "max_megabytes", 0 < self.max_megabytes < math.inf, "must be above 0 and finite")


@dataclass(frozen=True)
class SyncCanarySettings:
    """Checks with a few trajectories if a weight sync happened.

    Attributes:
        trajectories: how many trajectories of the first batch both engines score again at weight syncs, to check that
            the weights arrived (docs/guard.md#a-weight-sync-that-did-not-happen). null takes 8 for a LoRA and in
            `separate_async`, whose weight transfer is not verl's naive one, and 0 otherwise. 0 turns the check off.
            They are of as many prompts as possible; at least 4 prompts are needed.
        every: check the first three syncs, and then every this many.
    """

    trajectories: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        holds = self.trajectories in (None, 0) or self.trajectories >= FEWEST_PROMPTS
        rule = f"must be 0, null for the default, or at least {FEWEST_PROMPTS}, without which nothing is known"
        require(self, "trajectories", holds, rule)
        require(self, "every", self.every >= 1, "must be at least 1")


RESYNC = "resync"


@dataclass(frozen=True)
class SyncCheckSettings:
    """Compares every tensor of a weight sync where training hands it over and where the rollout takes it
    (docs/guard.md#every-tensor-of-a-sync).

    Attributes:
        every: after the first sync, check the syncs of every this many steps. 0 checks only the first.
        action: what to do if a tensor is wrong: `warn`; `stop` before the next step; or `resync`: send the weights once
            more and check them again, and stop if a tensor is wrong again.
    """

    every: int = 0
    action: str = "warn"

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be a number of steps, or 0 for the first sync only")
        require_one_of(self, "action", ("warn", "stop", RESYNC))

    def __str__(self) -> str:
        later = {0: "", 1: " and each later one"}.get(self.every, f", then every {self.every} steps")
        return f"the first sync{later}; {self.action}"


@dataclass(frozen=True)
class FakeQuantization:
    """For experiments: the rollout's weights are rounded as in a quantised rollout, at the engine's start and at each
    weight sync. Everything else stays as it is. This shows the gap of fp4 without an fp4 kernel, even on a CPU, and how
    a correction or replay handles it. It saves neither time nor memory.

    Activations and the KV cache are not rounded, and scales keep full precision. A LoRA's base is rounded, its adapter
    is not. verl_ext/core/fake_quant.py has the grid of each format.

    The start-up table shows how many weights each worker of the rollout has rounded. If there are none, the run stops.
    The run is refused with `rollout.quantization`, with a model that is already quantised, and with
    `checkpoint_engine.backend=delta_sharded`, which changes weights that are already loaded. To try it on a laptop:
    `bash tools/quickstart.sh stability.fake_quantization.format=fp4`.

    Attributes:
        format: round the weights of attention and experts to `fp8` (e4m3), `int8`, `int4` or `fp4` (e2m1). Embeddings,
            norms and biases are not rounded. `none` rounds nothing.
        group: the weights that share a scale: `tensor`, `channel` (one output's weights), or a number of consecutive
            inputs, at least 2, which must divide the inputs.
        router: round the routers too.
        head: round the head too.
    """

    format: str = NONE
    group: int | str = 32
    router: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "format", FORMATS)
        # A group of one is its own scale: nothing would be rounded.
        number = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 2
        holds = number or self.group in GROUPS
        require(self, "group", holds, f"must be {', '.join(GROUPS)}, or a number of inputs, at least 2")

    @property
    def active(self) -> bool:
        return self.format != NONE

    def __str__(self) -> str:
        """`fp4, group 32, router`"""
        besides = [name for name in ("router", "head") if getattr(self, name)]
        return ", ".join([described(self.format, {"group": self.group}), *besides])


@dataclass(frozen=True)
class Switches:
    """All settings except those of the methods.

    Attributes:
        denominator: `full` keeps tokens of weight 0 in the loss's divisor, as in IcePop's objective. `kept` takes them
            out of the mask, and so out of the divisor and every other term of the loss.
        plugins: modules to import first. They register your own corrections, filters, losses and estimators
            (docs/extend.md).
        expects: settings that the preset needs, each with the value, or the list of values, that it may have. Another
            value stops the run; null expects nothing.
        left_out: overrides with which the launch adapted the preset to this run, each with the reason. Only the launch
            sets it.
        metrics: log `vllm_kl/*` each step, even if nothing else needs them. A correction, a filter, a threshold, a rule
            or dumped trajectories turn them on too.
        breakdown: log `vllm_kl/*` also by probability, entropy, position, turn and server of the rollout. Asynchronous
            modes always log them by lag too.
        batch_skip: when to skip the update of a batch.
        guard: rules on logged signals, and the guard's other actions.
        kl_denominator: the policy that `actor.kl_loss_type=unbiased` assumes sampled the tokens: `infer`, the rollout
            engine (the paper's), or `old`, the training engine before the update.
        router_agreement: compare the experts of `compute_log_prob` with those of the rollout. Turns on
            `rollout.enable_rollout_routing_replay`, which turns on `enable_return_routed_experts` of vLLM or SGLang.
        router_agreement_share: compare experts in this share of the trajectories, above 0. The experts of the other
            trajectories are not sent to the workers (docs/routing.md#a-share-of-the-trajectories).
        replay: routing replay, on every training engine: `R2`, `R3` or `disabled`. null leaves the engine's own
            `router_replay.mode` as it is.
        top_tokens: the rollout's K most likely tokens at each place.
        score_centering: subtract from each token's score its mean under the sampler, weighted as the token is; needs
            one update per step.
        reuse_log_probs: leave compute_log_prob out: l_old is l_theta of the update's own forward pass, which has the
            same weights if a batch has one optimizer step. `on`, `off`, or `auto`, on where the result is the same
            (docs/methods.md#one-pass-less).
        rescoring: score a few trajectories again with the weights that sampled them (`separate_async`).
        trajectories: write a few trajectories per step, token by token, for the report.
        cascade_attention: vLLM's cascade attention: `on`, `off`, or `default`, the engine's own choice. The setting of
            the started vLLM workers is checked.
        sync_canary: check that weight syncs reach the rollout.
        sync_check: compare every tensor of a weight sync at both ends: `{}` for the first sync, or
            `{every: STEPS, action: resync}`. null turns it off.
        fake_quantization: round the rollout's weights as in a quantised rollout.
        float32_head: compute logits in float32 in both engines, which removes the rounding of the logits from the gap
            (docs/methods.md#float32-logits).
        any_version: start with a verl, vLLM, SGLang or megatron-core that the plugin was not written for, at your own
            risk. The launch prints each hook that does not fit.
    """

    denominator: str = "full"
    plugins: list[str] = field(default_factory=list)
    expects: dict[str, Any] | None = None
    left_out: dict[str, str] | None = None
    metrics: bool = False
    breakdown: bool = True
    batch_skip: BatchSkip = field(default_factory=BatchSkip)
    guard: GuardSettings = field(default_factory=GuardSettings)
    kl_denominator: str = "infer"
    router_agreement: bool = False
    router_agreement_share: float = 1.0
    replay: str | None = None
    top_tokens: TopTokenSettings = field(default_factory=TopTokenSettings)
    score_centering: bool = False
    reuse_log_probs: str = "off"
    rescoring: Rescoring = field(default_factory=Rescoring)
    trajectories: TrajectoryDump = field(default_factory=TrajectoryDump)
    cascade_attention: str = "default"
    sync_canary: SyncCanarySettings = field(default_factory=SyncCanarySettings)
    sync_check: SyncCheckSettings | None = None
    fake_quantization: FakeQuantization = field(default_factory=FakeQuantization)
    float32_head: bool = False
    any_version: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "denominator", ("full", "kept"))
        require_one_of(self, "kl_denominator", KL_DENOMINATORS)
        require_one_of(self, "cascade_attention", ("default", "on", "off"))
        require_one_of(self, "reuse_log_probs", ("off", "auto", "on"))
        if self.replay is not None:
            require_one_of(self, "replay", REPLAY_MODES)
        share = self.router_agreement_share
        require(self, "router_agreement_share", 0 < share <= 1, "must be above 0 and at most 1")


def _usual_text(value: Any) -> str:
    """Returns a default as the value of an override; null for a group of settings, which sets the group's defaults."""
    return "null" if is_dataclass(value) else json.dumps(value)


def _drops(chosen: ConfiguredMethod[Correction]) -> bool:
    """Returns True if a correction may drop tokens; a correction that is registered to weigh by the ratio may not."""
    method = chosen.method
    return method.drops or bool(method.mask_override) or not method.weighs_by_ratio(chosen.settings)


@dataclass(frozen=True)
class StabilityConfig(Switches):
    """Everything that the plugin adds to a run. All of it is off by default.

    Attributes:
        correction: the name of a correction, or a list of names whose weights multiply.
        filters: batch filters in the order in which they run: a list of names, or a mapping from name to settings.
        rules: a mapping from a name to a rule of the guard. `batch_skip` is the first rule.
    """

    correction: tuple[ConfiguredMethod[Correction], ...] = ()
    filters: tuple[ConfiguredMethod[BatchFilter], ...] = ()
    rules: tuple[Rule, ...] = ()

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of settings that contradict each other, whatever the run is."""
        yield from self._ratio_problems()
        yield from self._cap_problems()
        yield from self._denominator_problems()
        yield from self._agreement_problems()
        for rule in self.rules:
            yield from self._rule_problems(rule)
        yield from self._guard_problems()

    def _agreement_problems(self) -> Iterator[Problem]:
        needing = {
            f"correction={one.name}": self.without(one.name)
            for one in self.in_update
            if "router_agreement" in one.method.reads
        }
        needing |= {
            f"filters.{one.name}": self.without_filter(one.name) for one in self.filters if one.method.needs_agreement
        }
        if needing and self.router_agreement_share < 1:
            yield Problem(f"stability.{next(iter(needing))} {self.needs_every_agreement}", fix=(EVERY_AGREEMENT,))
        if self.router_agreement_share < 1:
            needing[f"router_agreement_share={self.router_agreement_share:g}"] = (EVERY_AGREEMENT,)
        if needing and not self.router_agreement:
            setting, off = next(iter(needing.items()))
            yield Problem(f"stability.{setting} needs the routers' agreement", fix=(AGREEMENT,), leave_out=off)

    def _ratio_problems(self) -> Iterator[Problem]:
        weigh = [chosen for chosen in self.correction if chosen.method.weighs_by_ratio(chosen.settings)]
        if len(weigh) < 2:
            return
        masks = [f"stability.{one.name}.{one.method.mask_override}" for one in weigh if one.method.mask_override]
        also = f" ({weigh[-1].name} can be combined with another correction: {masks[-1]})" if masks else ""
        yield Problem(
            f"stability.correction={list(self.correction_names)}: {' and '.join(one.name for one in weigh)} each weigh "
            "a token by its ratio, which would count twice",
            fix=tuple(masks) if len(masks) == len(weigh) - 1 else (),
            otherwise=f"keep one of them{also}",
        )

    def _cap_problems(self) -> Iterator[Problem]:
        for chosen in _unbounded(self.correction):
            yield Problem(
                f"stability.correction={','.join(self.correction_names)}: {chosen.name} weighs by the ratio without a "
                f"cap ({described(chosen.name, asdict(chosen.settings))}), and no other correction bounds it",
                fix=(f"stability.{chosen.name}=null",),
                otherwise=f"add {' or '.join(each.name for each in CORRECTIONS.values() if each.bounds)}",
                leave_out=self.without(chosen.name),
            )

    def _denominator_problems(self) -> Iterator[Problem]:
        if self.denominator == "full":
            return
        full = ("stability.denominator=full",)
        if inside := [chosen.name for chosen in self.in_update]:
            yield Problem(
                f"stability.denominator=kept cannot count the tokens that {' and '.join(inside)} drops in the update",
                fix=full,
                otherwise="use stability.filters.off_policy_negative",
                leave_out=full,
            )
        elif not any(_drops(chosen) for chosen in self.correction):
            yield Problem(
                "stability.denominator=kept counts the tokens that stability.correction keeps before the update, and "
                f"stability.correction={','.join(self.correction_names) or 'none'} drops none there",
                fix=full,
                otherwise="name a correction that drops tokens, such as icepop",
                leave_out=full,
            )

    def _guard_problems(self) -> Iterator[Problem]:
        """Yields a problem for a setting of an action that no rule has."""
        usual, actions = GuardSettings(), {rule.action for rule in self.rules}
        for name, readers in READ_BY.items():
            if getattr(self.guard, name) != getattr(usual, name) and actions.isdisjoint(readers):
                yield Problem(
                    f"stability.guard.{name} is set, and no rule has action={' or '.join(readers)}; give a rule of "
                    "stability.guard.rules that action, or leave the setting out",
                    leave_out=(f"stability.guard.{name}={_usual_text(getattr(usual, name))}",),
                )

    def _rule_problems(self, rule: Rule) -> Iterator[Problem]:
        where = f"stability.guard.rules.{rule.name}"
        if rule.action == "tighten":
            if not self.bands:
                yield Problem(
                    f"{where}: action=tighten narrows IcePop's band; name icepop in stability.correction, or choose "
                    "another action",
                    leave_out=(f"{where}.action=warn",),
                )
            for chosen in self.bands:
                (low, least), (high, most) = asdict(chosen.settings).items()
                if not least <= 1 <= most:
                    yield Problem(
                        f"{where}: action=tighten narrows the band towards 1, which is outside "
                        f"stability.{chosen.name}.{low}={least:g} to {high}={most:g}"
                    )

    @property
    def needs_every_agreement(self) -> str:
        """The clause of an error about a feature that reads every token's agreement."""
        return (
            "reads the routers' agreement of every token, and "
            f"stability.router_agreement_share={self.router_agreement_share:g} compares only some trajectories"
        )

    @property
    def correction_names(self) -> tuple[str, ...]:
        return tuple(chosen.name for chosen in self.correction)

    @property
    def asked_correction(self) -> str:
        """The corrections as an override."""
        return _correction_override(self.correction_names)

    def without(self, *names: str) -> tuple[str, ...]:
        """Returns the overrides that leave out these corrections and reset their settings.

        A correction that weighs by the ratio without a cap goes with the last one that bounds it.
        """
        rest = [chosen for chosen in self.correction if chosen.name not in names]
        if any(chosen.name in names and chosen.method.bounds for chosen in self.correction):
            unbounded = _unbounded(rest)
            rest = [chosen for chosen in rest if chosen not in unbounded]
        left_out = [chosen for chosen in self.correction if chosen not in rest]
        changed = [one.name for one in left_out if asdict(one.settings) != defaults(one.method.settings)]
        kept = _correction_override([chosen.name for chosen in rest])
        return (kept, *(f"stability.{name}=null" for name in changed))

    def without_filter(self, name: str) -> tuple[str]:
        """Returns the override that leaves a filter out."""
        rest = {chosen.name: asdict(chosen.settings) for chosen in self.filters if chosen.name != name}
        return (f"stability.filters={json.dumps(rest) if rest else 'null'}",)

    @property
    def before_update(self) -> tuple[ConfiguredMethod[Correction], ...]:
        """The corrections that the trainer applies."""
        return tuple(chosen for chosen in self.correction if not chosen.method.in_update)

    @property
    def in_update(self) -> tuple[ConfiguredMethod[Correction], ...]:
        """The corrections that the workers' loss applies."""
        return tuple(chosen for chosen in self.correction if chosen.method.in_update)

    @property
    def bands(self) -> tuple[ConfiguredMethod[Correction], ...]:
        """The corrections that keep tokens in a fixed band of k, as icepop does. Their settings have `narrowed`."""
        return tuple(chosen for chosen in self.correction if hasattr(chosen.settings, "narrowed"))

    def corrections(self, *, narrowed: bool = False) -> dict[str, dict[str, Any]]:
        """Returns name -> settings of `before_update`, for `core.measure`.

        Args:
            narrowed: whether bands are narrowed, in logarithms, by guard.tighten_factor.
        """
        found = {}
        for chosen in self.before_update:
            narrows = narrowed and chosen in self.bands
            settings = chosen.settings.narrowed(self.guard.tighten_factor) if narrows else chosen.settings
            found[chosen.name] = asdict(settings)
        return found

    def filter_chain(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns name and settings of the batch filters, in order, for `core.filters`."""
        return [(chosen.name, asdict(chosen.settings)) for chosen in self.filters]


def _unbounded(chosen: Sequence[ConfiguredMethod[Correction]]) -> list[ConfiguredMethod[Correction]]:
    """Returns the corrections that weigh by the ratio without a cap, if none of these bounds it."""
    bounded = any(one.method.bounds for one in chosen)
    return [] if bounded else [one for one in chosen if one.method.is_ratio(one.settings)]


def _correction_override(names: Sequence[str]) -> str:
    """Returns the override that chooses these corrections."""
    if not names:
        return "stability.correction=none"
    return f"stability.correction={names[0] if len(names) == 1 else '[' + ','.join(names) + ']'}"
