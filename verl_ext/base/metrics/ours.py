"""The metrics of this package. Notation as in the README: l_infer, l_old, l_theta, and k = exp(l_old - l_infer)."""

from functools import partial

from verl_ext.base.metrics.metric import NATS, Metric, Section
from verl_ext.base.names import PROMPT_EFFECT

AXES = "{prob,entropy,position,turn,calls}"

after = partial(Metric, when="after")
divergence = partial(Metric, better="lower", scale="log")
# Not at every step: a batch may have no advantage of a sign, no trajectory of a lag, no rescored trajectory.
rare = partial(Metric, rare=True)
rare_after = partial(after, rare=True)
rare_divergence = partial(divergence, rare=True)

GAP = Section(
    "The gap between the engines",
    "Logged with `stability.metrics=true`, or if a feature reads them: a correction, a filter, a threshold, a rule, "
    "a trajectory dump. They cover the response tokens that the model generated (m = 1).\n\n"
    "- **By bucket**, with `stability.breakdown=true` (the default), if more than one bucket of an axis is in use: "
    "`/prob/0-0.01`, `/entropy/2-`, `/position/0-256`, `/turn/01`, `/calls/02` (an answer with two calls of tools). By "
    "the sign of the advantage too.\n"
    "- **By lag**, in the asynchronous modes. There a rollout may be older than the policy, and all metrics include "
    "how far the policy has moved since. The lag is the number of weight versions in between: `/lag/0` is the engines' "
    "part. Where several versions sampled a trajectory, `/lag/span` has the tokens before those of the newest.\n"
    "- **By server**, if the rollout has several: `/replica/00` to `/replica/63`, in the order that is printed at the "
    "start, and likewise `/node/00`.\n"
    "- **In bypass mode** they cover the first mini-batch of a step, after batch filters. They are logged with the "
    "update.",
    (
        Metric(
            "vllm_kl/k1",
            "mean of l_infer - l_old, an estimate of KL(rollout || training) that can be negative",
            NATS,
            worst="largest",
            finite=True,
            label="rollout KL, k1",
        ),
        divergence(
            "vllm_kl/k3",
            "mean of k - log k - 1, the same KL, never negative",
            NATS,
            worst="highest",
            finite=True,
            label="rollout KL, k3",
        ),
        Metric(
            "vllm_kl/l_old",
            "mean of l_old, the level of the sampled tokens' log-probabilities: it falls where the policy explores",
            NATS,
            label="log-probability",
        ),
        divergence("vllm_kl/prob_diff_mean", "mean of |exp(l_infer) - exp(l_old)|", label="mean prob. diff."),
        divergence(
            "vllm_kl/prob_diff_max", "largest |exp(l_infer) - exp(l_old)|", worst="highest", label="largest prob. diff."
        ),
        divergence("vllm_kl/prob_diff_std", "standard deviation of |exp(l_infer) - exp(l_old)|"),
        divergence("vllm_kl/log_ratio_abs_mean", "mean of |l_infer - l_old|", NATS, label="mean |log k|"),
        divergence("vllm_kl/log_ratio_abs_max", "largest |l_infer - l_old|", NATS),
        Metric("vllm_kl/ess", "effective sample size of k: (sum k)^2 / sum k^2 over the tokens", "share", "higher"),
        divergence("vllm_kl/chi2", "mean of k^2, minus 1"),
        divergence(
            "vllm_kl/sequence_gap_mean",
            "mean of |mean of l_infer - l_old over a response|, which `geo_mask` and `opsm` bound",
            NATS,
        ),
        divergence("vllm_kl/sequence_gap_max", "largest |mean of l_infer - l_old over a response|", NATS),
        Metric(
            "vllm_kl/filled",
            "responses with an l_infer that no sampler returns: above 0, or exactly 0 where exp(l_old) is below 0.5",
            "share",
            "lower",
        ),
        Metric(f"vllm_kl/share/{AXES}/*", "tokens in the bucket", "share"),
        Metric(f"vllm_kl/k1/{AXES}/*", "k1 of the bucket's tokens", NATS),
        divergence(f"vllm_kl/k3/{AXES}/*", "k3 of the bucket's tokens", NATS),
        rare("vllm_kl/share/advantage/{positive,negative}", "tokens with an advantage of this sign", "share"),
        rare("vllm_kl/k1/advantage/{positive,negative}", "k1 of these tokens", NATS),
        rare_divergence("vllm_kl/k3/advantage/{positive,negative}", "k3 of these tokens", NATS),
        rare("vllm_kl/advantage_skew", "k1 of positive advantages minus k1 of negative ones", NATS, worst="largest"),
        rare("vllm_kl/share/lag/*", "tokens of trajectories that are this many versions old", "share"),
        rare("vllm_kl/k1/lag/*", "k1 of these tokens", NATS),
        rare_divergence("vllm_kl/k3/lag/*", "k3 of these tokens", NATS),
        rare_divergence("vllm_kl/log_ratio_abs_mean/lag/*", "mean |l_infer - l_old| of these tokens", NATS),
        rare(
            "vllm_kl/share/{replica,node}/*",
            "tokens that this server of the rollout generated, or the servers of this node; `other`: several servers",
            "share",
        ),
        rare_divergence("vllm_kl/k3/{replica,node}/*", "k3 of these tokens", NATS),
        rare_divergence("vllm_kl/log_ratio_abs_mean/{replica,node}/*", "mean |l_infer - l_old| of these tokens", NATS),
        rare("vllm_kl/engine/k1", "mean of l_infer - l, with l from the weights that sampled the trajectory", NATS),
        rare_divergence("vllm_kl/engine/k3", "k3 of l_infer and l: the engines' part", NATS),
        rare_divergence("vllm_kl/engine/log_ratio_abs_mean", "mean |l_infer - l|", NATS),
        rare("vllm_kl/stale/k1", "mean of l - l_old: how far the policy has moved since", NATS),
        rare("vllm_kl/stale/k3", "by how much that movement raises k3; negative if it lowers it", NATS),
        rare(
            "vllm_kl/rescored", "trajectories that these five metrics cover; engine and stale add up to their k1 and k3"
        ),
    ),
    override="stability.metrics=true",
)

TOP_TOKENS = Section(
    "The sampler's top tokens",
    "Logged with `stability.top_tokens.k`, or if a feature needs it: truncated sampling, score centering. Not in "
    "bypass mode, which has no compute_log_prob. At each place, the rollout returns its most likely tokens in addition "
    "to the sampled one, and the training engine computes the log-probabilities of the same tokens. So these metrics "
    "do not depend on which token was sampled.",
    (
        divergence(
            "vllm_kl/head",
            "KL(rollout || training) over the top tokens, with all others as one. k1 and k3 estimate the same KL (or a "
            "slightly larger one) with noise. With truncated sampling it is over the kept tokens",
            NATS,
            worst="highest",
            label="rollout KL, top tokens",
        ),
        Metric("vllm_kl/head_mass", "probability that the rollout gives to the top tokens", "share"),
        Metric(
            "vllm_kl/head_differs", "places where the training engine has another most likely token", "share", "lower"
        ),
        Metric("vllm_kl/head_missing", "generated tokens without top tokens", "share", "lower"),
        after("actor/score_centering", "the term that centers the score, in the loss"),
    ),
    override="stability.top_tokens.k=32",
)

CORRECTIONS = Section(
    "Corrections",
    "Logged with a correction; in bypass mode with the update, like the gap. IcePop's authors saw 1 to 2 per mille of "
    "the tokens dropped, rising during training ([their post](https://ringtech.notion.site/icepop), figure 10), and "
    "later a share that fell while the gap grew ([KPop](https://ringtech.notion.site/kpop)).",
    (
        Metric("correction/dropped", "tokens at weight 0", "share", worst="highest", label="tokens dropped"),
        Metric(
            "correction/dropped_low",
            "dropped tokens with a ratio below a correction's bounds",
            "share",
            worst="highest",
            label="ratio too low",
        ),
        Metric("correction/dropped_high", "the other dropped tokens", "share", worst="highest", label="ratio too high"),
        Metric(f"correction/{{dropped_low,dropped_high}}/{AXES}/*", "the same for the bucket's tokens", "share"),
        rare(
            "correction/{dropped_low,dropped_high}/lag/*",
            "the same for tokens that are this many versions old",
            "share",
        ),
        Metric("correction/sequences_dropped", "responses that kept no token", "share"),
        Metric("correction/weight_mean", "mean weight of a token"),
        Metric("correction/weight_min", "smallest weight of a kept token, if there is any"),
        Metric("correction/weight_max", "largest weight of a token"),
        Metric("correction/entropy_dropped", "mean entropy of the dropped tokens, if there are any", "nats"),
        Metric("correction/entropy_kept", "mean entropy of the kept tokens", "nats"),
        Metric(
            "correction/*/low",
            "tokens (responses, for `mis`, `geo_mask`, `tis_sequence`) below the bounds of the correction in the name",
            "share",
        ),
        Metric("correction/*/high", "the same above the bounds", "share"),
    ),
    override="stability=icepop",
)

ROUTING = Section(
    "Routing",
    "Logged with `stability.router_agreement=true`. T and I are the experts that training and inference chose for a "
    "token in a layer; means are over the compared tokens and the MoE layers, which are numbered from 0 (dense layers "
    "do not count). Metrics that compare the agreement with the gap also need the metrics of the gap.",
    (
        Metric(
            "router/agreement",
            "experts that both engines chose: |T and I| / top-k",
            "share",
            "higher",
            worst="lowest",
            label="router agreement",
        ),
        Metric(
            "router/agreement/error",
            "with `stability.router_agreement_share` below 1: standard error of the agreement as an estimate for the "
            "whole batch, which lies within two of these in about 95% of steps",
            "share",
            "lower",
            label="standard error",
        ),
        Metric("router/sampled", "with such a share: compared trajectories among those with generated tokens", "share"),
        Metric("router/agreement/layer_*", "the agreement in one layer", "share", "higher", worst="lowest"),
        Metric(f"router/agreement/{AXES}/*", "the agreement of the bucket's tokens", "share", "higher"),
        rare(
            "router/agreement/{replica,node}/*", "the agreement of tokens that this server generated", "share", "higher"
        ),
        rare("router/agreement/lag/*", "the agreement of tokens that are this many versions old", "share", "higher"),
        Metric("router/exact_match", "tokens with T = I", "share", "higher"),
        Metric("router/exact_match/layer_*", "the same in one layer", "share", "higher"),
        Metric(
            "router/any_layer_differs",
            "tokens with T != I in at least one layer",
            "share",
            "lower",
            worst="highest",
            label="differs in any layer",
        ),
        Metric(
            "router/first_differing_layer", "mean number of the first layer with T != I, over the tokens that have one"
        ),
        Metric("router/first_differs/layer_*", "tokens of which this layer is the first that differs", "share"),
        Metric(
            "router/margin_equal",
            "gap between the k-th and the next score of the router's top-k, where T = I; if the engine's adapter "
            "records the scores",
        ),
        Metric("router/margin_differs", "the same where T != I"),
        Metric(
            "router/own_agreement",
            "under replay, the agreement of the experts that the training router would have chosen itself",
            "share",
            "higher",
        ),
        Metric("router/tokens", "tokens compared", "tokens"),
        Metric("router/unknown", "tokens to be compared whose routing the rollout did not return", "share", "lower"),
        Metric(
            "router/invalid",
            "tokens whose routing was refused, because no router can choose it; the training router chooses for them",
            "share",
            "lower",
            worst="highest",
            label="routing refused",
        ),
        Metric(
            "router/checked",
            "trajectories whose routes have a checksum from the rollout's server; the workers compare it with the "
            "routes that arrive",
            "share",
            "higher",
        ),
        Metric(
            "router/retracted",
            "with SGLang, trajectories that it retracted because its KV cache was full, and continued later: their "
            "experts come from the pass that read their tokens again",
            "share",
            "lower",
            label="retracted",
        ),
        after(
            "router/load_max",
            "tokens of the busiest expert over the mean of its layer, in the most uneven layer: 1 + MaxVio",
            better="lower",
            worst="highest",
            label="busiest expert, over mean",
        ),
        after("router/load_max/layer_*", "the same in one layer", better="lower", worst="highest"),
        after(
            "router/load_idle",
            "experts without a token in this batch, of all layers",
            "share",
            "lower",
            label="experts idle",
        ),
        after(
            "router/load_effective",
            "experts in effective use, exp(H) / E with H the entropy of a layer's load; mean over the layers: 1 if all "
            "experts get as many tokens",
            "share",
            "higher",
            worst="lowest",
            label="experts in effective use",
        ),
        after(
            "router/load_moved",
            "distance of the load from that of the run's first batch: the share of choices that have moved to another "
            "expert (total variation, mean over the layers). A resumed run takes the first batch from its checkpoint",
            "share",
        ),
        after(
            "router/load_apart",
            "the same distance between training and rollout",
            "share",
            "lower",
        ),
        Metric("router/disagreement_gap_correlation", "correlation of 1 - agreement with |log k|, where both vary"),
        Metric("router/gap_equal", "mean |log k| of the tokens whose experts all agree", NATS, "lower"),
        Metric("router/gap_differs", "mean |log k| of the tokens with an expert that differs", NATS, "lower"),
    ),
    override="stability.router_agreement=true",
)

ANSWERS = Section(
    "The answers",
    "Logged if the metrics of the gap are measured, also in bypass mode.",
    (
        Metric(
            "answers/looped",
            "responses that end in a loop: at least their last 64 tokens repeat a period of up to 256 tokens, at "
            "least four times",
            "share",
            "lower",
        ),
        Metric(
            "answers/cut",
            "responses that were cut: they have the largest length (`rollout.response_length`) and no end token",
            "share",
            "lower",
        ),
    ),
    override="stability.metrics=true",
)

REWARD = Section(
    "The reward",
    "Logged if the metrics of the gap are measured, also in bypass mode.",
    (
        Metric(
            PROMPT_EFFECT,
            "F of a one-way analysis of variance: the variance of the reward between prompts over the variance within "
            "them. It averages 1 if the reward does not depend on the prompt, as with a grader that returns random "
            "numbers",
            label="F of the prompts",
        ),
    ),
    override="stability.metrics=true",
)

FILTERS = Section(
    "Filters",
    "Logged with batch filters, or `stability.denominator=kept`. Shares are of the batch's tokens and of its "
    "trajectories with a token.",
    (
        after("filter/kept_tokens", "tokens that all filters kept", "share"),
        after("filter/kept_trajectories", "trajectories that kept a token", "share"),
        after("filter/*/dropped_tokens", "tokens that this filter dropped, and none before it", "share"),
        after("filter/*/dropped_trajectories", "trajectories that this filter dropped completely", "share"),
        after("filter/retokenization_drift/drifted", "trajectories whose text encodes to other tokens", "share"),
        after("filter/*/*", "a metric that your own filter returns"),
    ),
)

GUARD = Section(
    "The guard",
    "Logged if the metrics of the gap are measured ([docs/guard.md](guard.md)). The growth is that of k3, or of "
    "`stability.guard.boundary.signal`.",
    (
        after(
            "guard/skipped",
            "updates skipped in this step: 0 or 1, if it has one update",
            "share",
            "lower",
            label="updates skipped",
        ),
        after("guard/skips", "updates skipped so far, over restarts", "updates", "lower"),
        after("guard/rollbacks", "rollbacks so far, over restarts", "rollbacks", "lower"),
        rare_after(
            "guard/undos", "updates taken back so far, over restarts, if a rule can do that", "updates", "lower"
        ),
        rare_after("guard/lr_scale", "factor on the schedule's learning rate, if a rule can lower it"),
        rare_after("guard/threshold", "`stability.batch_skip.threshold`"),
        rare_after("guard/boundary", "`stability.guard.boundary.value`, where the growth is that of k3", NATS),
        rare_after(
            "guard/level", "the k3 above which the guard warns: `stability.guard.level`, once it is known", NATS
        ),
        rare_after("guard/tightened", "1 while IcePop's band is narrowed, if a rule can do that"),
        rare("guard/growth_rate", "slope of log k3 over its last readings, from 8 on", "nats per step", "lower"),
        rare("guard/growth_rate_low", "lower end of the slope's interval", "nats per step"),
        rare("guard/growth_rate_high", "upper end of the slope's interval", "nats per step"),
        Metric(
            "guard/steps_to_boundary",
            "steps until k3 passes the boundary, if it keeps growing like this; 0 past it, 1000 if no crossing is in "
            "sight",
            "steps",
            "higher",
        ),
        rare(
            "guard/growth_mixed",
            "0 if that growth is of the engines' part only (lag 0, or rescored), 1 if it includes the rollouts' age",
        ),
        rare(
            "guard/mask_blind",
            "with `icepop` as a correction, 1 while k3 grows significantly and fewer and fewer tokens are dropped",
            better="lower",
        ),
        rare("guard/collapsed", "1 while the reward has lost nine tenths of its best and stays there", better="lower"),
    ),
)

SYNC = Section(
    "The weight sync",
    "Logged if the sync canary is on, after each checked sync, for the worst of the rollout engines. Since the last "
    "sync that arrived, training's log-probabilities have moved. The metrics give the share of that change that the "
    "rollout's log-probabilities show too ([docs/guard.md](guard.md#a-weight-sync-that-did-not-happen)): 1 up to "
    "rounding, 0 if nothing arrived.",
    (
        rare_after("sync/moved", "root mean square of the change in training, per token", NATS),
        rare_after("sync/arrived_low", "lower end of the share's interval", "share", "higher"),
        rare_after(
            "sync/arrived_high",
            "upper end, once the updates have moved more than the gap may hide",
            "share",
            "higher",
            worst="lowest",
            label="update arrived, at most",
        ),
        rare_after(
            "sync/arrived_median",
            "share of the median token, among the half of the tokens that training moved most; from the rollout engine "
            "where it is furthest from 1",
            "share",
        ),
        rare_after(
            "sync/arrived_spread",
            "median distance of these tokens' shares from that median: small if every token got the same share, as "
            "when the update was multiplied",
            "share",
        ),
        rare_after(
            "sync/followed",
            "median movement of a token's score in the rollout since the last check, over that in training: 0 if its "
            "weights stayed the same and its scores repeat exactly; of the rollout engine where it is smallest",
            "share",
        ),
        rare_after(
            "sync/apart",
            "all updates since the first check: median distance of these tokens' shares from 1; from the rollout "
            "engine where it is largest",
            "share",
            "lower",
        ),
        rare_after(
            "sync/rounding",
            "the gap at the first check over all updates since then, medians of the same tokens: it falls as updates "
            "add up, and so does the part of `sync/apart` that is rounding",
            "share",
        ),
    ),
    override="stability.sync_canary.trajectories=8",
)

SYNC_CHECK = Section(
    "Each tensor of a weight sync",
    "Logged with `stability.sync_check`, for the syncs that it checks "
    "([docs/guard.md](guard.md#every-tensor-of-a-sync)).",
    (
        rare_after(
            "sync/wrong_tensors",
            "tensors that did not arrive as they were sent, and parameters that the sync did not write; a tensor "
            "counts for each process of the rollout. With `action: resync`, of the weights that were sent again",
            better="lower",
            worst="highest",
            label="wrong tensors",
        ),
    ),
    override="stability.sync_check={}",
)

UPDATE = Section(
    "In the update",
    "Logged by the workers, with the feature in the name: the mini-batch gate, a policy loss, OPSM, a filter, "
    "routing replay. Shares and means are of a micro-batch, averaged over the step.",
    (
        after(
            "actor/gate/refused",
            "mini-batches whose step was refused: they passed a bound, or had no token left to learn from",
            "share",
            "lower",
        ),
        after(
            "actor/clipped_share/{high,low}",
            "with PPO's clip and l_old of its own: tokens with A > 0 clipped from above, with A < 0 from below",
            "share",
        ),
        rare_after(
            "actor/clipped_probability/{high,low}",
            "mean exp(l_old) of these tokens: DAPO found it below 0.2 at the high side, where the clip holds back "
            "exploration",
        ),
        after(
            "actor/self_gap",
            "k3 of l_old against l_theta in the first mini-batch, where the same weights computed both; not in bypass "
            "mode or without compute_log_prob",
            NATS,
            "lower",
        ),
        after("actor/gate/vllm_kl", "k3 of l_infer against l_theta", NATS),
        after("actor/gate/policy_kl", "k3 of l_old against l_theta; not in bypass mode, where l_old is l_infer", NATS),
        after("actor/after_update/policy_kl", "k3 of l_old against the policy that the update made", NATS),
        after(
            "actor/after_update/vllm_kl",
            "k3 of l_infer against that policy; both over a few trajectories of the batch",
            NATS,
        ),
        after("actor/gate/grad_norm", "the gradient norm before clipping, if the gate has a limit for it"),
        after("actor/icepop/dropped_low", "tokens below the band", "share"),
        after("actor/icepop/dropped_high", "tokens above the band", "share"),
        after("actor/opsm/dropped", "tokens dropped", "share"),
        after("actor/opsm/sequences_dropped", "responses dropped", "share"),
        after("actor/opsm/mismatch", "l_infer - l_old over a response: between the engines (bypass: 0)", NATS),
        after(
            "actor/opsm/{mismatch,sequences_dropped}/lag/*", "contribution of responses that are this many versions old"
        ),
        after("actor/opsm/staleness", "l_old - l_theta over a response: since the old policy (bypass: both)", NATS),
        after("actor/m2po/dropped", "tokens dropped", "share"),
        after("actor/m2po/second_moment", "mean of (l_theta - l_infer)^2 over tokens that move away", NATS),
        after("actor/llds/penalised", "tokens penalised", "share"),
        after(
            "actor/llds/penalty",
            "mean of max(0, l_old - l_theta) over all tokens, with 0 for tokens that are not penalised",
            NATS,
        ),
        after("actor/filter_scale", "factor on sequence means, if filters dropped whole responses"),
        after("actor/router_own_agreement", "`router/own_agreement` of the update's own pass", "share", "higher"),
    ),
)

SECTIONS = (GAP, TOP_TOKENS, CORRECTIONS, ROUTING, ANSWERS, REWARD, FILTERS, GUARD, SYNC, SYNC_CHECK, UPDATE)
