"""Finds where a transformers model chooses experts, and can replace the choice.

Shape legend: N tokens of a forward pass, E experts, K experts per token (top-k).

Every router of the library has one top-k over [N, E] scores, whatever comes before it (softmax, sigmoid, bias, groups)
and after it (normalisation, scaling). Only that top-k is intercepted. The model's own code then gathers the weights of
replayed experts from the router's own scores, and gradients reach the router.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_ext.base.errors import ConfigError, HookError
from verl_ext.base.patching import wrap
from verl_ext.routing.engines import EXPERT_COUNTS, TOP_KS, first_of

CHOICE_METHOD = "route_tokens_to_experts"  # the method of MoE blocks whose router module returns only logits
REPLAY_OFF = ("stability.replay=disabled", "actor_rollout_ref.actor.fsdp_config.router_replay.mode=disabled")
WITHOUT_ROUTING = ("stability.router_agreement=false", *REPLAY_OFF)

Choose = Callable[[Tensor, Tensor], Tensor]
"""(scores [N, E], chosen ids [N, K] int64) -> the ids to use; the same tensor leaves the choice as it is."""


@dataclass(frozen=True)
class ChoicePoint:
    """A method of a module in which one MoE layer chooses experts.

    Attributes:
        name: the name of the module within the model.
        layer: number of its decoder layer, dense layers counted.
        module, method: the module, and the name of its method.
    """

    name: str
    layer: int
    module: nn.Module
    method: str

    def intercept(self, experts: int, top_k: int, choose: Callable[[], Choose | None]) -> None:
        """Passes each choice through the function that `choose()` returns then; None leaves the choice as it is."""

        def method(original: Callable, *args: Any, **kwargs: Any) -> Any:
            active = choose()
            if active is None:
                return original(*args, **kwargs)
            with ExpertTopK(experts, top_k, active):
                return original(*args, **kwargs)

        wrap("expert_choices", self.module, self.method, method)


class ExpertTopK(TorchFunctionMode):
    """While open, passes each top-k over experts to `choose`, and returns its result to the caller."""

    def __init__(self, experts: int, top_k: int, choose: Choose):
        super().__init__()
        self.experts, self.top_k, self.choose = experts, top_k, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # Not the top-k over groups of experts, nor over the experts of each group.
        if scores.dim() != 2 or scores.shape[1] != self.experts or result.indices.shape[1] != self.top_k:
            return result
        ids = self.choose(scores, result.indices)
        if ids is result.indices:
            return result
        return torch.return_types.topk((scores.gather(1, ids), ids))


def find_choices(model: nn.Module) -> list[ChoicePoint]:
    """Returns the points where a transformers MoE chooses experts, in layer order.

    A model declares its router class in `_can_record_outputs["router_logits"]`. Some routers return only logits, and
    the block around them chooses in `route_tokens_to_experts`. Layers for multi-token prediction are left out, because
    the rollout's routing has none.

    Raises:
        HookError: there is no such point, or its decoder layer cannot be read from its name.
    """
    specs = [
        spec
        for module in model.modules()
        for spec in _to_list((getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    ]
    points: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{outer}." for outer in points))
        if hasattr(module, CHOICE_METHOD):
            points[name] = CHOICE_METHOD
        elif any(_matches(spec, name, module) for spec in specs) and not inside:
            points[name] = "forward"
    found = [
        ChoicePoint(name, _layer(name), model.get_submodule(name), method)
        for name, method in points.items()
        if not re.search(r"(^|\.)(mtp|nextn)", name)
    ]
    if not found:
        raise HookError(
            f"no router was found in {type(model).__name__}: a dense model has none, and an MoE has to declare its "
            "router class in _can_record_outputs['router_logits'], as transformers' own do",
            WITHOUT_ROUTING,
        )
    return sorted(found, key=lambda point: point.layer)


def _to_list(spec: Any) -> list[Any]:
    if spec is None:
        return []
    return list(spec) if isinstance(spec, list | tuple) else [spec]


def _matches(spec: Any, name: str, module: nn.Module) -> bool:
    """Returns True if the module fits `spec`, a module class or transformers' OutputRecorder around one."""
    target = getattr(spec, "target_class", spec)
    layer_name = getattr(spec, "layer_name", None)
    return isinstance(module, target) and (layer_name is None or layer_name in name)


def _layer(name: str) -> int:
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    if found is None:
        raise HookError(f"the decoder layer of router {name} cannot be read from its name", WITHOUT_ROUTING)
    return int(found[1])


def expert_counts(hf_config: Any) -> tuple[int, int]:
    """Returns (experts, experts per token) of a transformers config.

    Raises:
        HookError: the config lacks a known name for one of them.
    """
    text = hf_config.get_text_config()
    experts, top_k = first_of(text, EXPERT_COUNTS), first_of(text, TOP_KS)
    if not experts or not top_k:
        raise HookError(
            f"{type(text).__name__} does not say how many experts there are (one of {', '.join(EXPERT_COUNTS)}) and "
            f"how many a token goes to (one of {', '.join(TOP_KS)})",
            WITHOUT_ROUTING,
        )
    return experts, top_k


def check_replayable(hf_config: Any) -> None:
    """Raises HookError if a replayed expert outside the router's own groups would have the weight 0.

    DeepSeek-V2 and DeepSeek-OCR-2 (transformers 5.10) set the scores outside the chosen groups to 0 and take the
    weights from these scores. The other families with groups mask the scores only for the choice, and take the weights
    from the unmasked scores.
    """
    if getattr(hf_config.get_text_config(), "topk_method", None) == "group_limited_greedy":
        raise HookError(
            "the model's config has topk_method=group_limited_greedy: this router weighs an expert outside its own "
            "groups with 0, and a replayed one would not count",
            fix=REPLAY_OFF,
        )


def probe_choices(hf_config: Any, *, trust_remote_code: bool = False) -> None:
    """Checks, on a model without weights, that each kind of router of this architecture chooses by one top-k.

    Args:
        trust_remote_code: allow a model to run code of its own; without a value, transformers asks on the terminal.

    Raises:
        ConfigError: the model cannot be built.
        HookError: no router is found, or one cannot be intercepted.
    """
    from transformers import AutoModelForCausalLM

    experts, top_k = expert_counts(hf_config)
    hidden = hf_config.get_text_config().hidden_size
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ConfigError(
                f"a model of {type(hf_config).__name__} cannot be built here, to look at its routers: transformers has "
                "no text model for it, or it needs code of its own, which model.trust_remote_code allows",
                WITHOUT_ROUTING,
            ) from error
        for point in {(type(p.module), p.method): p for p in find_choices(model)}.values():
            seen = _run_on_meta(point, experts, top_k, hidden, model.dtype)
            if seen != 1:
                raise _unreadable(point, f"takes {seen} top-{top_k} of {experts} experts instead of one")


def _run_on_meta(point: ChoicePoint, experts: int, top_k: int, hidden: int, dtype: torch.dtype) -> int:
    """Calls a choice point on two tokens; returns how often it chooses."""
    method = getattr(point.module, point.method)
    widths = {"hidden_states": hidden, "router_logits": experts}
    names = [p.name for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    for shape in ((2,), (1, 2)):  # most take [tokens, width], a few [batch, sequence, width]
        seen: list[Tensor] = []

        def keep(scores: Tensor, ids: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(ids)
            return ids

        # An argument that is not named above is the experts' bias.
        arguments = [torch.empty(*(shape if n in widths else ()), widths.get(n, experts), dtype=dtype) for n in names]
        try:
            with ExpertTopK(experts, top_k, keep):
                method(*arguments)
            return len(seen)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            failure = error
    raise _unreadable(point, f"does not run on two tokens by itself ({failure})") from failure


def _unreadable(point: ChoicePoint, why: str) -> HookError:
    return HookError(f"cannot read router {type(point.module).__name__}, which {why}", WITHOUT_ROUTING)
