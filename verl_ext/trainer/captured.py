"""Warnings about a rollout's routing that is missing, or cannot be what its routers chose (core/routing.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.base.errors import HookError
from verl_ext.base.names import LOOP_METRICS, ROLLOUT_ROUTES
from verl_ext.core.routing import REASONS, RouterSums, known_rows, refused_rows
from verl_ext.features.routing import SHARE, sglang_returns_routing
from verl_ext.features.verl_config import ROLLOUTS, replay_mode, replay_setting, replays_here, rollout_name
from verl_ext.guard.state import Decision, Event
from verl_ext.trainer.queue import get_fields

SAMPLED = 4  # trajectories per step that are checked where verl replays them: some 50 MB of 32,768 tokens each
ENGINE_KWARGS = "++actor_rollout_ref.rollout.engine_kwargs"
RETRACTED = "router/retracted"
SURELY = 10  # trajectories per agent loop's process that should have come without routing
MODULAR = {"vllm": "moe_backend=triton", "sglang": "moe_runner_backend=triton"}


@dataclass(frozen=True)
class Counts:
    """Tokens whose routing is accepted, unknown, or refused, by reason.

    Attributes:
        compared, left_out: trajectories, if a share of the batch was to be compared.
    """

    believed: int
    unknown: int
    refused: Mapping[str, int]
    compared: int = 0
    left_out: int = 0

    @property
    def tokens(self) -> int:
        return self.believed + self.unknown + sum(self.refused.values())

    @classmethod
    def from_sums(cls, packed_BC: Tensor) -> "Counts":
        """Counts the tokens that the model generated, by the trajectories' RouterSums, packed."""
        left_out = int((RouterSums.unpack(packed_BC).left_out > 0).sum())
        sums = RouterSums.unpack(packed_BC.sum(0, keepdim=True))
        refused = dict(zip(REASONS, map(int, sums.refused[0].tolist()), strict=True))
        return cls(int(sums.tokens), int(sums.unknown), refused, len(packed_BC) - left_out, left_out)

    @classmethod
    def from_routes(cls, routes: Sequence[Tensor]) -> "Counts":
        """Counts the tokens of a few trajectories, by their routes [n, l, K]; not their last, which have none.

        A layer of only zeros counts as a dense one, and every id that is not negative as an expert.
        """
        routes = [rows[:-1] for rows in routes]
        routes_TLK = torch.cat(routes)
        routes_TLK = routes_TLK[:, routes_TLK.any(0).bool().any(1)]
        offsets = torch.tensor([0, *map(len, routes)]).cumsum(0)
        refused_T = refused_rows(routes_TLK, torch.iinfo(routes_TLK.dtype).max + 1, offsets)
        refused = {name: int((refused_T == 1 + index).sum()) for index, name in enumerate(REASONS)}
        known = int(known_rows(routes_TLK).sum())
        return cls(known - sum(refused.values()), len(routes_TLK) - known, refused)

    @property
    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        refused = sum(self.refused.values())
        return {"router/unknown": self.unknown / self.tokens, "router/invalid": refused / self.tokens}


def sampled_counts(batch: KVBatchMeta, config: DictConfig) -> Counts | None:
    """Counts a few trajectories if the rollout's experts are replayed and not compared; else None."""
    if replay_mode(config) != "R3":
        return None
    few = KVBatchMeta(keys=batch.keys[:SAMPLED], tags=batch.tags[:SAMPLED], partition_id=batch.partition_id)
    data = get_fields(few, [ROLLOUT_ROUTES])
    if ROLLOUT_ROUTES not in data.keys():  # noqa: SIM118 (a TensorDict)
        return None
    return Counts.from_routes(data[ROLLOUT_ROUTES].unbind())


def retracted_share(batch: KVBatchMeta, config: DictConfig) -> float | None:
    """Returns the share of the trajectories that SGLang retracted because its cache was full, and continued later; None
    without its routing.

    Their log-probabilities are those of the sampling. Their experts are from the forward pass that read their tokens
    again: SGLang keeps routing by slot of its cache, and returns it once a request is done (`get_topk` of
    srt/state_capturer/base.py, 0.5.12). vLLM sends a token's experts on when it is sampled, before a preemption.
    """
    if not sglang_returns_routing(config):
        return None
    data = get_fields(batch, [LOOP_METRICS])
    if LOOP_METRICS not in data.keys():  # noqa: SIM118 (a TensorDict)
        return None
    counts = [metrics["num_preempted"] for metrics in data[LOOP_METRICS]]
    return sum(count > 0 for count in counts) / len(counts)


class CapturedRouting:
    """Warns once of each problem, and stops a run that would replay nothing from its start."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._believed = False
        self._compared = self._left_out = 0

    def judge(self, counts: Counts, config: DictConfig, step: int) -> Decision:
        """Warns of new problems.

        Raises:
            HookError: R3 is on, and no token had valid routing since the start of this process; or a share of the
                trajectories was to have routing, and all of them had it.
        """
        self._believed |= counts.believed > 0
        self._expect_left_out(counts, config)
        wrong = _wrong(counts)
        if replay_mode(config) == "R3" and counts.tokens and not self._believed:
            name = rollout_name(config)
            raise HookError(
                f"{replay_setting(config)}=R3 has nothing to replay: {' '.join(wrong.values()).removesuffix('.')}",
                fix=(f"{replay_setting(config)}=disabled",),
                otherwise=f"if {ROLLOUTS[name]}'s kernel does not return its experts, choose a kernel that does, "
                f"{ENGINE_KWARGS}.{name}.{MODULAR[name]}",
            )
        new = {name: said for name, said in wrong.items() if name not in self._told}
        if counts.believed and "unknown" in new:  # only a few: router/unknown shows them
            del new["unknown"]
        self._told |= new.keys()
        return Decision(tuple(_event(step, name, said, counts.metrics, config) for name, said in new.items()))

    def judge_retracted(self, share: float, step: int) -> Decision:
        """Warns of the first retraction."""
        if not share or "retracted" in self._told:
            return Decision()
        self._told.add("retracted")
        reason = (
            f"SGLang ran out of KV cache and read the tokens of {share:.2%} of the trajectories again: their experts "
            "are from that forward pass, not from the one that sampled them; to avoid it, run fewer requests at once "
            "(rollout.max_num_seqs) or give it more cache (rollout.gpu_memory_utilization)"
        )
        return Decision((Event(step, "routing", RETRACTED, share, 0.0, "warn", reason),))

    def _expect_left_out(self, counts: Counts, config: DictConfig) -> None:
        """Checks that each agent loop's process left out its part, to within one trajectory
        (upstream/agent_loop.py)."""
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


def _wrong(counts: Counts) -> dict[str, str]:
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
