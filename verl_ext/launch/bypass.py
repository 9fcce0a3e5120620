"""verl's bypass mode, in which the rollout's log-probabilities stand for the training engine's (verl 0.9.1).

Its trainer copies `rollout_log_probs` to `old_log_probs` and leaves compute_log_prob out; the policy loss stays what
`policy_loss.loss_mode` says. So r = exp(l_theta - l_infer) in it: what is k in the first pass of the update.
"""

from omegaconf import DictConfig, OmegaConf

from verl_ext.settings.losses import LOSS, LOSSES, base_of

BYPASS = "algorithm.rollout_correction.bypass_mode"
WITHOUT_RATIO = ("gpg",)  # of verl's losses; -log pi_theta A, in which l_old does not stand


def bypasses(config: DictConfig) -> bool:
    return bool(OmegaConf.select(config, BYPASS))


def loss_has_ratio(config: DictConfig) -> bool:
    """Whether the policy loss, or the one that it builds upon, weighs by r; one of the user's own counts as such."""
    node = OmegaConf.select(config, LOSS) or {}
    mode = node.get("loss_mode")
    return (base_of(node) if mode in LOSSES else mode) not in WITHOUT_RATIO
