"""The causes of a run's problems, in one table. The report, the guard, `verl-ext probe` and `verl-ext doctor` all name
a cause in its words.

Each finds causes in its own way: `guard/diagnosis.py` by the marks that they leave in the metrics, `probe/verdict.py`
by what both engines make of the same tokens, the doctor by the settings of a launch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeReading:
    """Something that `verl-ext probe` shows.

    Attributes:
        shows: the object of "it shows".
        options: what the command needs for it, besides the overrides of the launch.
    """

    shows: str
    options: str = ""


FP32 = "--sweep fp32"
PROBE_READINGS = {  # docs/probe.md explains the readings
    "agreement": ProbeReading(
        "no gap, because it samples from all tokens at temperature 1, with new weights, one answer per pass"
    ),
    "decode": ProbeReading("the rollout engine apart from itself: `decode` far from both `prefill` and `train`"),
    "rounding": ProbeReading("no gap with fp32", FP32),
    "coarse": ProbeReading("a gap with fp32 too (or an engine that refuses fp32)", FP32),
    "router": ProbeReading("states that start to differ at a router, by no more than 16-bit rounding"),
    "choice": ProbeReading("next to no gap with the rollout's experts (`replayed`), and routers whose logits agree"),
    "replay": ProbeReading("a larger gap with the rollout's experts (`replayed`) than without (`train`)"),
    "layer": ProbeReading("states that start to differ in one layer, by more than 16-bit rounding"),
    "first attention": ProbeReading("states that start to differ in layer 0's attention, by more than 16-bit rounding"),
    "head": ProbeReading("states that agree, and log-probabilities that do not (`head`)"),
    "lost": ProbeReading("an update that moves training and not the rollout"),
    "part": ProbeReading("an update that moves the rollout differently from training, and widens the gap"),
}


@dataclass(frozen=True)
class Cause:
    """Something that can be wrong with a run.

    Attributes:
        name: as planted runs, tables and `verl-ext doctor --json` call it.
        title: what is wrong, a sentence without its dot.
        check: the one thing to look at.
        override: what to try, as an override of `python -m verl_ext.main_ppo`; "" if no setting helps.
        moe_override: what to try in a mixture of experts; "" if that is `override` too.
        probe: names of the PROBE_READINGS that it may have; () if the probe cannot find it.
        doctor: the doctor's checks that find it in the settings of a launch.
        of_gap: it makes the engines differ; False if it is in the learning itself.
    """

    name: str
    title: str
    check: str
    override: str = ""
    moe_override: str = ""
    probe: tuple[str, ...] = ()
    doctor: tuple[str, ...] = ()
    of_gap: bool = True

    @property
    def advice(self) -> str:
        """The check for this cause, and the override to try."""
        return self._advice(self.override)

    @property
    def moe_advice(self) -> str:
        """The same for a mixture of experts."""
        return self._advice(self.moe_override or self.override)

    def _advice(self, override: str) -> str:
        return f"check {self.check}" + (f"; try {override}" if override else "")


CAUSES = {
    cause.name: cause
    for cause in (
        # Weights that did not arrive.
        Cause(
            "old_weights",
            "The rollouts are made with old weights",
            "by how many versions rollouts are behind: training/off_policy/trajectory_staleness, and vllm_kl/k3/lag/*",
            "stability=opsm",
            moe_override="stability=moe",
            probe=("agreement",),
        ),
        Cause(
            "lost_sync",
            "Weight syncs do not arrive in the rollout",
            "the names and the count of the weights that a sync sends; a LoRA that the server does not serve",
            "stability.sync_canary.trajectories=8",
            probe=("lost",),
            doctor=("weight sync",),
        ),
        Cause(
            "partial_sync",
            "Weight syncs arrive in part",
            "the names that a sync sends against those of the rollout's model: a layer, a bucket, the experts",
            "stability.sync_canary.trajectories=8",
            probe=("part",),
        ),
        Cause(
            "scaled_update",
            "Updates arrive, multiplied by a factor",
            "alpha / rank of the LoRA on both sides, and whether it is merged twice",
            probe=("part",),
        ),
        # Two computations from the same weights.
        Cause(
            "two_precisions",
            "The engines round differently: dtypes or kernels",
            "the dtypes of weights, routers and head on both sides (`verl-ext doctor`, precision)",
            "precision=fp16",
            probe=("rounding", "router"),
            doctor=("dtype of both engines", "training dtype", "log-prob precision", "cascade attention"),
        ),
        Cause(
            "quantized",
            "The rollout computes with rounded weights",
            "rollout.quantization and the kernels of its experts; which layers are left out of it",
            "stability=r3 stability.correction=tis",
            probe=("coarse",),
            doctor=("quantized rollout", "quantized training", "fake quantization"),
        ),
        Cause(
            "router_bias",
            "One engine chooses experts with a bias that the other lacks",
            "e_score_correction_bias (or its like) on both sides, and whether a sync sends it",
            "stability=r3",
            probe=("choice",),
        ),
        Cause(
            "wrong_weights",
            "A layer has other weights in one engine",
            "the layer's tensors on both sides, and the order of its experts (`verl-ext probe`: where states come "
            "apart)",
            probe=("layer",),
        ),
        Cause(
            "positions",
            "Tokens have other positions in one engine",
            "position ids at the end of the prompt and of each turn, padding on the left, rope settings",
            probe=("first attention",),
        ),
        Cause(
            "leak",
            "Tokens attend to another sequence",
            "the mask between packed sequences, and the prefix cache: switch packing off, then prefix caching",
            "actor_rollout_ref.model.use_remove_padding=false",
            probe=("agreement", "decode"),  # of packing, and of the cache
        ),
        Cause(
            "respelled",
            "Training reads other tokens than were sampled",
            "whether text is decoded and encoded again between rollout and training (a tool loop, a chat template)",
            "stability.filters='{retokenization_drift:{}}'",
            probe=("decode",),
        ),
        Cause(
            "wrong_routes",
            "Replayed experts are not those that the rollout used for these tokens",
            "the order and the cuts of routed_experts against input_ids; a run without replay, for comparison",
            probe=("replay",),
            doctor=("captured routing", "recorded routing"),
        ),
        # Sampling, and the log-probabilities that are returned with it.
        Cause(
            "temperature",
            "The engines apply different temperatures",
            "rollout.temperature, the model's generation_config, and who divides the logits",
            "actor_rollout_ref.rollout.temperature=1.0",
            probe=("agreement", "head"),  # of a setting, and of what scales the logits otherwise
            doctor=("temperature",),
        ),
        Cause(
            "truncated",
            "The rollout cuts its distribution, and training does not know",
            "rollout.top_p and rollout.top_k, the model's generation_config, min_p, logits processors",
            "actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1",
            probe=("agreement",),
            doctor=("truncated sampling", "vocabulary"),
        ),
        Cause(
            "raw_log_probs",
            "The rollout returns log-probabilities of another distribution than it samples from",
            "rollout.logprobs_mode (vLLM: processed_logprobs) and SGLANG_RETURN_ORIGINAL_LOGPROB",
            "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
            probe=("agreement",),
            doctor=("log-prob mode",),
        ),
        # The learning itself.
        Cause(
            "learning_rate",
            "Updates are too large: the learning rate",
            "actor/grad_norm, actor/ppo_kl and actor/pg_clipfrac in the steps before the fall",
            doctor=("resumed schedule",),
            of_gap=False,
        ),
        Cause(
            "entropy_collapse",
            "The entropy collapses before the task is learnt",
            "actor/entropy against the reward; the entropy bonus, clip_ratio_high, the share of positive advantages",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            of_gap=False,
        ),
        Cause(
            "hacked_reward",
            "The reward pays for length",
            "a few of the longest answers (trajectories), and the reward by length; an overlong penalty",
            "reward.reward_manager.name=dapo",
            of_gap=False,
        ),
        Cause(
            "noisy_reward",
            "The reward does not rise: it does not tell right from wrong, or nothing is learnt from it",
            "the grader on a few trajectories (the same answer twice, a wrong one, an empty one), then the learning "
            "rate",
            of_gap=False,
        ),
        Cause(
            "no_signal",
            "All answers to a prompt get the same reward",
            "critic/score/min and max, and prompts that are always or never solved",
            "algorithm.filter_groups.enable=true",
            of_gap=False,
        ),
    )
}


def settling_sentence(first: Cause, second: Cause | None = None) -> str:
    """Returns the command that decides between two causes, and what it shows for each; "" if none decides.

    The probe decides if the two have no reading in common; else the doctor, if one of its checks finds one of them.
    """
    others = second.probe if second is not None else ()
    if first.probe and not set(first.probe) & set(others):
        readable = [cause for cause in (first, second) if cause is not None and cause.probe]
        options = {PROBE_READINGS[name].options for cause in readable for name in cause.probe} - {""}
        command = " ".join(("verl-ext probe", *sorted(options)))
        shown = [f'if "{cause.title}", it shows {_words(cause)}' for cause in readable]
        return f"`{command}` with the overrides of the launch: {'; '.join(shown)}"
    if checks := [check for cause in (first, second) if cause is not None for check in cause.doctor]:
        named = " and ".join(f'"{check}"' for check in checks)
        return f"`verl-ext doctor` with the overrides of the launch shows it at {named}"
    return ""


def _words(cause: Cause) -> str:
    return ", or ".join(PROBE_READINGS[name].shows for name in cause.probe)
