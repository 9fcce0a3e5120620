"""Metrics of the experts and top tokens that the rollout captured with its tokens, and warnings if some are missing or
cannot be right (core/routing.py)."""

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import HookError
from verl_ext.base.names import LOOP_METRICS, ROLLOUT_ROUTES, ROUTE_SUM, ROUTER_SUMS, TOP_TOKEN_IDS, TOP_TOKEN_SUMS
from verl_ext.core.routing import REASONS, RouteCounts, router_metrics
from verl_ext.core.top_tokens import top_token_metrics
from verl_ext.features.feature import Need, RunFeatures
from verl_ext.features.routing import SHARE, sglang_returns_routing
from verl_ext.features.verl_config import ROLLOUTS, replay_mode, replay_setting, replays_here, rollout_name, truncates
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer.batch import QueueBatch

SAMPLED = 4  # trajectories checked per step if their routing is only replayed: some 50 MB at 32,768 tokens each
ENGINE_KWARGS = "++actor_rollout_ref.rollout.engine_kwargs"
RETRACTED = "router/retracted"
SURELY = 10  # if as many trajectories per agent loop's process should lack routing, at least one must
MODULAR = {"vllm": "moe_backend=triton", "sglang": "moe_runner_backend=triton"}


def retracted_share(batch: QueueBatch, config: DictConfig) -> float | None:
    """Returns the share of the trajectories that SGLang retracted because its cache was full, and continued later; None
    if SGLang returns no routing.

    Their log-probabilities are from the sampling, but their experts are from the later pass that read their tokens
    again: SGLang keeps routing by slot of its cache, and returns it once a request is done (`get_topk` of
    srt/state_capturer/base.py, 0.5.12). vLLM returns a token's experts when it is sampled, before any preemption.
    """
    if not sglang_returns_routing(config) or (metrics := batch.rows(LOOP_METRICS)) is None:
        return None
    return sum(one["num_preempted"] > 0 for one in metrics) / len(metrics)


class CapturedRouting:
    """Warns once about each problem, and stops a run that has had nothing to replay since its start."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._any_accepted = False
        self._compared = self._left_out = 0
        self._dtype_printed = False

    def judge(
        self, batch: QueueBatch, features: RunFeatures, step: int, *, late: bool = False
    ) -> tuple[dict[str, float], Decision]:
        """Returns `router/*` and warnings of new problems.

        Args:
            late: the workers compare the experts in the update, and `judge_counts` follows it.

        Raises:
            HookError: there is no routing to compare, or as in `judge_counts`.
        """
        counts, metrics = self._count(batch, features, late)
        events: tuple[Event, ...] = ()
        if counts is not None:
            events += self.judge_counts(counts, features.config, step).events
        if (share := retracted_share(batch, features.config)) is not None:
            metrics[RETRACTED] = share
            events += self.judge_retracted(share, step).events
        if (checksums := batch.numbers(ROUTE_SUM)) is not None:
            metrics["router/checked"] = (checksums != 0).double().mean().item()
        return metrics, Decision(events)

    def _count(
        self, batch: QueueBatch, features: RunFeatures, late: bool
    ) -> tuple[RouteCounts | None, dict[str, float]]:
        """Counts the tokens whose experts compute_log_prob has compared. If it has compared none, counts those of a few
        trajectories that are to be replayed. Returns their metrics too."""
        sums = batch.numbers(ROUTER_SUMS)
        if Need.COMPARED_ROUTERS in features.needs:
            sent = batch.dtype_of(ROLLOUT_ROUTES)
            if sums is None and (sent is None or not late):
                raise HookError(
                    "there is no routing to compare: the rollout's batch has no routed_experts",
                    fix=("stability.router_agreement=false",),
                    otherwise="check that the rollout runs with enable_return_routed_experts",
                )
            if not self._dtype_printed:  # not at the start: there is no routing yet
                self._dtype_printed = True
                print(f"verl_ext: routed_experts is sent as {sent}", flush=True)
        if sums is not None:
            return RouteCounts.from_sums(sums), router_metrics(sums)
        routes = batch.rows(ROLLOUT_ROUTES, SAMPLED) if replay_mode(features.config) == "R3" else None
        counts = None if routes is None else RouteCounts.from_routes(routes)
        return counts, {} if counts is None else counts.metrics

    def judge_counts(self, counts: RouteCounts, config: DictConfig, step: int) -> Decision:
        """Warns of new problems.

        Raises:
            HookError: R3 is on, and no token has had valid routing since this process started; or only a share of the
                trajectories should have routing, and all have it.
        """
        self._any_accepted |= counts.accepted > 0
        self._expect_left_out(counts, config)
        wrong = _wrong(counts)
        if replay_mode(config) == "R3" and counts.tokens and not self._any_accepted:
            name = rollout_name(config)
            raise HookError(
                f"{replay_setting(config)}=R3 has nothing to replay: {' '.join(wrong.values()).removesuffix('.')}",
                fix=(f"{replay_setting(config)}=disabled",),
                otherwise=f"if {ROLLOUTS[name]}'s kernel does not return its experts, choose a kernel that does, "
                f"{ENGINE_KWARGS}.{name}.{MODULAR[name]}",
            )
        new = {name: said for name, said in wrong.items() if name not in self._warned}
        if counts.accepted and "unknown" in new:  # only a few: router/unknown shows them
            del new["unknown"]
        self._warned |= new.keys()
        return Decision(tuple(_event(step, name, said, counts.metrics, config) for name, said in new.items()))

    def judge_retracted(self, share: float, step: int) -> Decision:
        """Warns of the first retraction."""
        if not share or "retracted" in self._warned:
            return Decision()
        self._warned.add("retracted")
        reason = (
            f"SGLang ran out of KV cache and read the tokens of {share:.2%} of the trajectories again: their experts "
            "are from that forward pass, not from the one that sampled them; to avoid it, run fewer requests at once "
            "(rollout.max_num_seqs) or give it more cache (rollout.gpu_memory_utilization)"
        )
        return Decision((Event(step, "routing", RETRACTED, share, 0.0, "warn", reason),))

    def _expect_left_out(self, counts: RouteCounts, config: DictConfig) -> None:
        """Raises HookError if no trajectory was left out; each agent loop's process leaves out its share of them, to
        within one (upstream/agent_loop.py)."""
        share = OmegaConf.select(config, SHARE, default=1.0)
        self._compared += counts.compared
        self._left_out += counts.left_out
        processes = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.num_workers", default=1)
        if not self._left_out and self._compared * (1 - share) > SURELY * processes:
            raise HookError(
                f"{SHARE}={share:g}, and each of {self._compared} trajectories came with routing: "
                "VERL_EXT_AGENT_LOOP did not reach the run's processes",
                fix=(f"{SHARE}=1",),
                otherwise="start the run outside of an open Ray session, and name verl_ext in "
                "VERL_USE_EXTERNAL_PLUGINS if that is set",
            )


def _wrong(counts: RouteCounts) -> dict[str, str]:
    """Returns reason -> a sentence."""
    found = {"unknown": (counts.unknown, "came without routing")}
    found |= {name: (count, REASONS[name]) for name, count in counts.refused.items()}
    return {name: f"{n:,} of {counts.tokens:,} tokens {said}." for name, (n, said) in found.items() if n}


def _event(step: int, name: str, said: str, metrics: Mapping[str, float], config: DictConfig) -> Event:
    if replay_mode(config) != "R3":
        outcome = "They are not compared."
    elif replays_here(config):
        outcome = "The training router chooses their experts."
    else:
        outcome = f"verl still replays them; set {replay_setting(config)}=disabled to avoid it."
    signal = "router/unknown" if name == "unknown" else "router/invalid"
    return Event(step, "routing", signal, metrics[signal], None, "warn", f"{said} {outcome}")


class CapturedTopTokens:
    """Computes `vllm_kl/head*`, and warns once if tokens came without the top tokens that the update reads."""

    def __init__(self) -> None:
        self._warned = False

    def judge(self, batch: QueueBatch, features: RunFeatures, step: int) -> tuple[dict[str, float], Decision]:
        """Returns the metrics, from the sums that compute_log_prob left in the batch, and the warning.

        Raises:
            HookError: compute_log_prob left none.
        """
        if not features.compares_top_tokens:
            return {}, Decision()
        if (sums := batch.numbers(TOP_TOKEN_SUMS)) is None:
            raise HookError(
                f"compute_log_prob read no top tokens: the rollout's batch has no {TOP_TOKEN_IDS}",
                otherwise="if VERL_USE_EXTERNAL_PLUGINS is set, check that it names verl_ext on all nodes",
            )
        metrics = top_token_metrics(sums)
        missing = metrics.get("vllm_kl/head_missing", 0.0)
        if not missing or self._warned or Need.TOP_TOKENS_IN_UPDATE not in features.needs:
            return metrics, Decision()
        self._warned = True
        effects = []
        if features.stability.score_centering:
            effects.append("their score is not centered")
        if truncates(features.config):
            effects.append("their l_old and entropy are over the whole vocabulary")
        reason = (
            f"{missing:.2%} of the model's tokens came without the sampler's top tokens, so {' and '.join(effects)}: "
            "the agent loop returns tokens that the rollout engine did not sample there"
        )
        event = Event(step, "top_tokens", "vllm_kl/head_missing", missing, 0.0, "warn", reason)
        return metrics, Decision((event,))
