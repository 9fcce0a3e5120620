"""The `stability.fake_quantization` settings: a gap between the engines, planted on purpose."""

from dataclasses import dataclass

from verl_ext.base.methods import described, require, require_one_of

NONE = "none"
FORMATS = (NONE, "fp8", "int8", "int4", "fp4")
GROUPS = ("tensor", "channel")
DEFAULT_GROUP = 32


@dataclass(frozen=True)
class FakeQuantization:
    """An experiment's switch: vLLM's weights are rounded as a quantised rollout has them, at the engine's start and at
    each weight sync. Everything else stays as it is. The gap of fp4 can so be studied without an fp4 kernel, also on a
    CPU, and a correction or replay can be tried against it. It saves neither time nor memory.

    Activations and the KV cache are not rounded, and scales keep full precision. A LoRA's base is rounded, its adapter
    is not. verl_ext/core/fake_quant.py has the grid of each format.

    The start-up table shows how many weights each of vLLM's workers has rounded. If it is none, the run stops there.
    The run is refused with `rollout.quantization`, with a model that is quantised already, and with
    `checkpoint_engine.backend=delta_sharded`, which changes weights that are loaded. To see it on a laptop:
    `bash tools/quickstart.sh stability.fake_quantization.format=fp4`.

    Attributes:
        format: round the weights of attention and experts to `fp8` (e4m3), `int8`, `int4` or `fp4` (e2m1). Embeddings,
            norms and biases are not rounded. `none` rounds nothing.
        group: the weights that share a scale: `tensor`, `channel` (one output's weights), or a number of consecutive
            inputs, at least 2, which must divide the inputs.
        router: round the routers too.
        head: round the head too.
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
