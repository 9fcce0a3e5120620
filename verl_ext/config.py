"""The `stability` settings: one dataclass a method, validated when built. Defaults stand here only;
`configs/stability/*.yaml` hold what a method changes."""

from dataclasses import dataclass, field
from typing import Any

from verl_ext.errors import ConfigError

CORRECTIONS = ("none", "icepop")
SKIP_METRICS = ("vllm_kl/k1", "vllm_kl/k3")
CASCADE_ATTENTION = ("default", "on", "off")
YAML_BOOLEANS = {"True": "on", "False": "off"}  # what YAML makes of a bare `on` and `off`


def require_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{setting}={value} is not known; choose one of: {', '.join(choices)}")


@dataclass
class IcePop:
    """Bounds of the mismatch ratio k inside which a token keeps its weight, both inclusive."""

    alpha: float = 0.5
    beta: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.alpha, self.beta, "stability.icepop")


def check_band(alpha: float, beta: float, prefix: str) -> None:
    """Raise ConfigError unless 0 <= alpha < beta; `prefix` is the settings' place in the config."""
    if not alpha >= 0:
        raise ConfigError(f"{prefix}.alpha={alpha:g} must be at least 0: it bounds a probability ratio")
    if not alpha < beta:
        raise ConfigError(f"{prefix}.alpha={alpha:g} must be below {prefix}.beta={beta:g}")


@dataclass
class BatchSkip:
    """Skip the update when `metric` passes `threshold`; null never skips for that reason."""

    metric: str = "vllm_kl/k3"
    threshold: float | None = None

    def __post_init__(self) -> None:
        require_choice("stability.batch_skip.metric", self.metric, SKIP_METRICS)
        if self.threshold is not None and not self.threshold >= 0:
            raise ConfigError(
                f"stability.batch_skip.threshold={self.threshold:g} must be at least 0, or null to never skip"
            )


@dataclass
class StabilityConfig:
    """Everything the plugin adds to a run; all of it is off by default.

    Attributes:
        correction: weight on the policy-gradient loss, made from the mismatch ratio.
        metrics: log `vllm_kl/*` each step; a correction or a batch-skip threshold turns it on as well.
        router_agreement: compare the experts that training and rollout chose.
        cascade_attention: vLLM's cascade attention; `default` leaves the engine's own choice.
    """

    correction: str = "none"
    icepop: IcePop = field(default_factory=IcePop)
    metrics: bool = False
    batch_skip: BatchSkip = field(default_factory=BatchSkip)
    router_agreement: bool = False
    cascade_attention: str = "default"

    def __post_init__(self) -> None:
        require_choice("stability.correction", self.correction, CORRECTIONS)
        self.cascade_attention = YAML_BOOLEANS.get(self.cascade_attention, self.cascade_attention)
        require_choice("stability.cascade_attention", self.cascade_attention, CASCADE_ATTENTION)

    @property
    def needs_log_probs(self) -> bool:
        """Whether anything compares the rollout's log-probabilities with the training engine's."""
        return self.metrics or self.correction != "none" or self.batch_skip.threshold is not None

    @property
    def active(self) -> bool:
        return self.needs_log_probs or self.router_agreement or self.cascade_attention != "default"


def stability_config(node: Any) -> StabilityConfig:
    """The validated dataclass of a Hydra `stability` node.

    Raises:
        ConfigError: a value is out of range or not among the choices.
    """
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(OmegaConf.structured(StabilityConfig), node)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, StabilityConfig)
    return config
