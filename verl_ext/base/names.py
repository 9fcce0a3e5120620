"""Names that several processes share: the fields of a batch, the files of a run, the buckets of a breakdown; and our
config groups.

Fields have the names that TransferQueue and the workers use. They are jagged, one row per trajectory, [B, r] over its
response tokens unless stated otherwise; n of all its tokens, L MoE layers of the training engine, L' layers as the
rollout sends them, K experts per token, H of the sampler's most likely tokens.
"""

import os
from pathlib import Path
from typing import Any

OUR_GROUPS = ("stability", "recipe", "precision")


def needs_our_module(override: str) -> bool:
    """Returns True if an override is of our groups: verl.trainer.main_ppo does not know it, verl_ext.main_ppo does."""
    return override.lstrip("+").startswith(OUR_GROUPS)


# From the rollout, with verl's names.
PROMPTS = "prompts"  # token ids of the prompt
RESPONSES = "responses"  # token ids
RESPONSE_MASK = "response_mask"  # 1 on tokens that the model generated
LOSS_MASK = "loss_mask"  # a copy of the response mask from the rollout; verl divides token means by its sum
REWARDS = "rm_scores"
ROLLOUT_LOG_PROBS = "rollout_log_probs"  # l_infer
ROLLOUT_ROUTES = "routed_experts"  # [B, n, L', K]
ROUTE_SUM = "routed_experts_sum"  # ours: [B, 1] int64, checksum of the row, computed where it was captured; 0 for none
LOOP_METRICS = "metrics"  # one dict per trajectory, verl's AgentLoopMetrics

# From the rollout: ours.
TOP_TOKEN_IDS = "top_token_ids"  # [B, r, H] int32, the most likely tokens at each place
TOP_TOKEN_LOG_PROBS = "top_token_log_probs"  # [B, r, H] float32; -inf where there is no such token
ANSWER_FACTS = "answer_facts"  # [B, 4] int64, of core.answers

# From compute_log_prob: verl's, then ours.
OLD_LOG_PROBS = "old_log_probs"  # l_old
ENTROPY = "entropy"
AGREEMENT = "router_agreement"  # share of a token's experts that both engines chose, mean over layers
ROUTER_SUMS = "router_sums"  # [B, *], a trajectory's sums by layer, for the metrics
TOP_TOKEN_SUMS = "top_token_sums"  # [B, *], a trajectory's sums over its top tokens, for the metrics
OLD_ROUTES = "old_routed_experts"  # [B, n, L, K], the experts that this pass used, for R2

# From the trainer: verl's names.
ADVANTAGES = "advantages"
WEIGHTS = "rollout_is_weights"  # on the policy-gradient loss
REF_LOG_PROBS = "ref_log_prob"

# From the trainer: ours.
LAG = "version_lag"  # [B, r] int64, a trajectory's bucket of `core.tokens.Lag` on each of its tokens

# Not fields: arguments of the update.
OWN_ROUTES = "own_routes"  # true: routers choose in this pass, although the run replays routing
FILTER_SCALE = "filter_scale"  # a number: trajectories with tokens over trajectories that the filters kept
UPDATE = "guarded_update"  # arguments of the workers' Gate.begin_update
FIRST_PASS = "first_pass"  # without compute_log_prob, arguments of the workers' FirstPass.begin_update
COMPARES = "compares_experts"  # true: in this update, routers are compared with the rollout's experts
# Arguments of a pass over a few trajectories, one at a time: so few may not divide into the run's micro-batches.
ONE_A_PASS = {
    "calculate_entropy": False,
    "compute_loss": False,
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 1,
}

# Files that a run writes next to its metrics file, as the trainer names them and the report finds them.
EVENTS = ".guard.jsonl"
TRAJECTORIES = ".trajectories.jsonl"


def older_part(trajectories: Path) -> Path:
    """Returns the path of the older part: `run.trajectories.jsonl` -> `run.trajectories.1.jsonl`."""
    return trajectories.with_suffix(".1.jsonl")


def metrics_path(project: str, experiment: str) -> Path:
    """Returns the file that verl 0.9.1's file logger writes."""
    if path := os.getenv("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    return Path(os.path.expanduser(os.getenv("VERL_FILE_LOGGER_ROOT", ".")), project, f"{experiment}.jsonl")


def events_path(config: Any) -> Path:
    """Returns the metrics file's path with .guard.jsonl for .jsonl; `config` is the run's."""
    return metrics_path(config.trainer.project_name, config.trainer.experiment_name).with_suffix(EVENTS)


def trajectories_path(config: Any) -> Path:
    """Returns the metrics file's path with .trajectories.jsonl for .jsonl; `config` is the run's."""
    return metrics_path(config.trainer.project_name, config.trainer.experiment_name).with_suffix(TRAJECTORIES)


PROMPT_EFFECT = "reward/prompt_effect"  # a metric that the controller, the lab and the diagnosis use

# The buckets of a breakdown, as metrics name them.
PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9)  # of exp(l_infer); the last bucket ends at 1
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0)  # of the training policy, in nats
POSITION_EDGES = (0, 256, 1024, 4096, 16384)  # of the response, tool output counted
TURNS = 8  # the last bucket holds all later turns; likewise for calls of tools
REPLICAS = 64  # servers of the rollout, and nodes, that have a bucket each
# Weight versions behind the policy; trajectories of several versions have their own bucket.
LAG_EDGES = (0, 1, 2, 3, 4, 8)


def bucket_names(edges: tuple[float, ...]) -> list[str]:
    """Returns `low-high` for each bucket; the last bucket is open: `low-`."""
    ends = [f"{edge:g}" for edge in edges[1:]] + [""]
    return [f"{low:g}-{high}" for low, high in zip(edges, ends, strict=True)]


_SERVERS = [*(f"{number:02d}" for number in range(REPLICAS)), "other"]

FEWEST_PROMPTS = 4  # of the sync canary's trajectories: with fewer, the error of the share that arrived is not known
BUCKETS = {  # axis -> the names of its buckets
    "prob": bucket_names(PROBABILITY_EDGES),
    "entropy": bucket_names(ENTROPY_EDGES),
    "position": bucket_names(POSITION_EDGES),
    "turn": (_TURNS := [f"{turn:02d}" for turn in range(TURNS - 1)] + [f"{TURNS - 1:02d}-"]),
    "calls": _TURNS,
    "lag": ["0", "1", "2", "3", "4-7", "8-", "span"],
    "replica": _SERVERS,
    "node": _SERVERS,
}

# Points on a model's way from tokens to logits: ends of the names of those in a layer, and the name of the last one.
INDEXER, ROUTER = ".indexer", ".router"
HEAD = "lm_head"  # of the logits, only the dtype is recorded
