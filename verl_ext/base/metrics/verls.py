"""Metrics of verl 0.9.1 that the guard, the report or the advice reads, and families for all others."""

from functools import partial

from verl_ext.base.metrics.metric import NATS, Metric, Section

after = partial(Metric, when="after")

VERL = Section(
    "verl's own",
    "Logged by verl 0.9.1, at every step or where verl's settings say; those that the guard, the report or its advice "
    "reads, and families for the others. `critic/score/mean` is verl's, logged by the plugin before the update.",
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
        after("actor/pg_clipfrac", "tokens whose ratio of the policy was clipped", "share", label="tokens clipped"),
        after("actor/pg_clipfrac_lower", "tokens clipped by the dual clip", "share"),
        after("actor/kl_loss", "the KL to the reference; with `kl_loss_type=unbiased`, ours", NATS),
        after("actor/lr", "learning rate"),
        after("actor/{ppo_kl,loss,kl_coef,entropy_loss}", "of the loss"),
        after("actor/reward_kl_{penalty,penalty_coeff}", "the KL in the reward"),
        after("actor/perf/*", "memory of the workers", "GB"),
        after("actor/**", "what else a policy loss returns"),
        after("critic/{score,rewards,advantages,returns,values}/{mean,max,min}", "over the batch"),
        after("critic/**", "what else the critic returns"),
        after("response_length/mean", "tokens of a response", "tokens", label="response length"),
        after("response_length/{max,min}", "tokens of the longest and of the shortest", "tokens"),
        after("response_length/clip_ratio", "responses as long as the longest of their batch", "share"),
        after("{response_length_non_aborted,prompt_length}/{mean,max,min}", "tokens", "tokens"),
        after("{response_length_non_aborted,prompt_length}/clip_ratio", "those as long as the longest", "share"),
        after("response/aborted_ratio", "responses without a token", "share"),
        after("timing_s/step", "a whole step", "s", "lower", worst="highest", label="step time"),
        after("timing_s/*", "a stage of it", "s", "lower"),
        after("timing_per_token_ms/*", "a stage of it, per token", "ms", "lower"),
        after("perf/**", "throughput and utilisation"),
        Metric(
            "val-core/**",
            "the main score of a validation set: `DATA_SOURCE/VARIABLE/METRIC`",
            better="higher",
            when="validation",
            rare=True,
            label="validation",
        ),
        Metric("val-aux/**", "other scores of it", when="validation", rare=True),
        after("rollout_corr/**", "verl's own pass over the gap, with `algorithm.rollout_correction`"),
        Metric("training/rollout_*", "verl's own comparison of the engines' probabilities", rare=True),
        after(
            "training/off_policy/trajectory_{spans,staleness,staleness_worst}/{mean,max,min}",
            "weight versions that a rollout was made with, and how many it is behind",
            "versions",
            rare=True,
        ),
        Metric("{training,validation,rollout}/**", "what verl logs when it comes", when="", rare=True),
        Metric("{global_seqlen,num_turns,tool_call_counts,separate_async}/**", "as verl has them", when=""),
    ),
)
