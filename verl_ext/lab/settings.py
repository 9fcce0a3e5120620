"""The `lab` node of a config: the model, the task, and the warm-up before it is trained."""

from dataclasses import dataclass, field

from verl_ext.methods import require, require_one_of

ROUTERS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class ModelSettings:
    """A mixture of experts.

    Attributes:
        layers, hidden, heads: of the transformer.
        experts, top_k: in each layer, and how many of them a token uses.
        expert_hidden: an expert's inner width.
        router: `softmax` as in Qwen3-MoE, or `sigmoid` as in DeepSeek-V3.
        groups, top_groups: of experts, and how many of them a token may use; for `sigmoid`.
    """

    layers: int = 2
    hidden: int = 32
    heads: int = 2
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 32
    router: str = "softmax"
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "expert_hidden", "groups"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")
        require(self, "heads", self.hidden % self.heads == 0, f"must divide hidden={self.hidden}")
        require(self, "top_k", 1 <= self.top_k <= self.experts, f"must be from 1 to experts={self.experts}")
        require_one_of(self, "router", ROUTERS)
        require(self, "groups", self.experts % self.groups == 0, f"must divide experts={self.experts}")
        require(self, "groups", self.groups == 1 or self.router == "sigmoid", "needs router=sigmoid")
        room = self.top_groups * self.experts // self.groups
        require(self, "top_groups", 1 <= self.top_groups <= self.groups, f"must be from 1 to groups={self.groups}")
        require(self, "top_groups", self.top_k <= room, f"leaves {room} experts to choose top_k={self.top_k} from")


@dataclass(frozen=True)
class TaskSettings:
    """What is asked.

    Attributes:
        name: one of verl_ext.lab.tasks.TASKS.
        digits: of a prompt; the answer has one token more, its end.
    """

    name: str = "prefix_sums"
    digits: int = 16

    def __post_init__(self) -> None:
        require(self, "digits", self.digits >= 1, "must be at least 1")


@dataclass(frozen=True)
class WarmUp:
    """Supervised training from random weights, until sampled answers reach a reward.

    Attributes:
        reward: where it ends.
        lr, batch: of Adam, and examples a step.
        balance: coefficient of the load-balancing loss, as in Switch Transformers (arXiv 2101.03961, eq. 4).
        most_steps: after which a warm-up that has not arrived is an error.
    """

    reward: float = 0.4
    lr: float = 3e-3
    batch: int = 64
    balance: float = 0.01
    most_steps: int = 5000

    def __post_init__(self) -> None:
        require(self, "reward", 0 < self.reward < 1, "must be between 0 and 1")


@dataclass(frozen=True)
class LabSettings:
    """What of a config is the lab's own, but for its regimes; see their classes."""

    model: ModelSettings = field(default_factory=ModelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    warm_up: WarmUp = field(default_factory=WarmUp)
