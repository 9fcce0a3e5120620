"""Metrics of verl 0.9.1 that the guard, the report or the advice reads, and families for all others."""

from functools import partial

from verl_ext.base.metrics.metric import NATS, Metric, Section

after = partial(Metric, when="after")

VERL = Section(
    "verl's own",
    "Logged by verl 0.9.1, at every step or as verl's settings say. Listed are those that the guard, the report or its "
    "advice reads, and families for the others. The plugin logs `critic/score/mean`, verl's metric, before the update.",
    (
        Metric("actor/entropy", "of the policy before the update", "nats", finite=True, label="policy entropy"),
        Metric("critic/score/mean", "mean score of a trajectory", better="higher", finite=True, label="reward"),
        after("actor/pg_loss", "the policy-gradient loss", finite=True),
        after(
            "actor/grad_norm",
            "before clipping; not a number if the engine skipped the step",
            worst="highest",
            finite=True,
            label="gradient norm",
        ),
        after("actor/pg_clipfrac", "tokens whose policy ratio was clipped", "share", label="tokens clipped"),
        after("actor/pg_clipfrac_lower", "tokens clipped by the dual clip", "share"),
        after(
            "actor/kl_loss",
            "the KL to the reference; with `kl_loss_type=unbiased`, ours",
            NATS,
            label="KL to the reference",
        ),
        after("actor/lr", "learning rate"),
        after("actor/ppo_kl", "KL of the update's policy to that of the old log-probs", NATS, label="KL within a step"),
        after("actor/{loss,kl_coef,entropy_loss}", "parts of the loss"),
        after("actor/reward_kl_{penalty,penalty_coeff}", "the KL in the reward"),
        after("actor/perf/*", "memory of the workers", "GB"),
        after("actor/**", "other values that a policy loss returns"),
        after("critic/{score,rewards,advantages,returns,values}/{mean,max,min}", "over the batch"),
        after("critic/**", "other values that the critic returns"),
        after("response_length/mean", "tokens of a response", "tokens", label="response length"),
        after("response_length/{max,min}", "tokens of the longest and of the shortest response", "tokens"),
        after("response_length/clip_ratio", "responses as long as the longest of their batch", "share"),
        after("{response_length_non_aborted,prompt_length}/{mean,max,min}", "tokens", "tokens"),
        after(
            "{response_length_non_aborted,prompt_length}/clip_ratio",
            "share as long as the longest of their batch",
            "share",
        ),
        after("response/aborted_ratio", "responses without a token", "share"),
        after("timing_s/step", "a whole step", "s", "lower", worst="highest", label="step time"),
        after("timing_s/*", "a stage of the step", "s", "lower"),
        after("timing_per_token_ms/*", "a stage of the step, per token", "ms", "lower"),
        after("perf/**", "throughput and utilisation"),
        Metric(
            "val-core/**",
            "the main score of a validation set: `DATA_SOURCE/VARIABLE/METRIC`",
            better="higher",
            when="validation",
            rare=True,
            label="validation",
        ),
        Metric("val-aux/**", "other scores of a validation set", when="validation", rare=True),
        after("rollout_corr/**", "verl's own metrics of the gap, with `algorithm.rollout_correction`"),
        Metric("training/rollout_*", "verl's own comparison of the engines' probabilities", rare=True),
        after(
            "training/off_policy/trajectory_{spans,staleness,staleness_worst}/{mean,max,min}",
            "number of weight versions that sampled a rollout, and how many versions it is behind",
            "versions",
            rare=True,
        ),
        Metric("{training,validation,rollout}/**", "other metrics that verl logs at some steps", when="", rare=True),
        Metric("{global_seqlen,num_turns,tool_call_counts,separate_async}/**", "as verl defines them", when=""),
    ),
)
