"""The `stability.fake_quantization` settings: a gap between the engines, planted on purpose."""

from dataclasses import dataclass

from verl_ext.methods import described, require, require_one_of

NONE = "none"
FORMATS = (NONE, "fp8", "int8", "int4", "fp4")
GROUPS = ("tensor", "channel")
DEFAULT_GROUP = 32


@dataclass(frozen=True)
class FakeQuantization:
    """The rollout computes with weights rounded as a quantised one's are, and with its own kernels.

    Attributes:
        format: what the weights of attention and experts are rounded to, at each sync; `none` leaves them.
        group: the weights that share a scale: `tensor`, `channel` (a row, an output), or so many consecutive inputs.
        router, head: round the routers too, and the head.
    """

    format: str = NONE
    group: int | str = DEFAULT_GROUP
    router: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "format", FORMATS)
        # A group of one is its own scale: nothing would be rounded.
        number = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 2
        holds = number or self.group in GROUPS
        require(self, "group", holds, f"must be {', '.join(GROUPS)}, or a number of inputs, at least 2")
        for name, off in (("group", DEFAULT_GROUP), ("router", False), ("head", False)):
            unused = not self.active and getattr(self, name) != off
            require(self, name, not unused, f"rounds nothing with format={NONE}", otherwise="choose a format")

    @property
    def active(self) -> bool:
        return self.format != NONE

    def __str__(self) -> str:
        """`fp4, group 32, router`"""
        besides = [name for name in ("router", "head") if getattr(self, name)]
        return ", ".join([described(self.format, {"group": self.group}), *besides])
