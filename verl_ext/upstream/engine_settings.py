"""Reads the settings that a running vLLM worker uses: vLLM accepts some arguments and ignores them.

Its CPU model runner, for example, never uses cascade attention, whatever the arguments ask for. `engine_calls.call`
calls these functions in vLLM's workers.
"""

from typing import Any


def uses_cascade_attention(model_runner: Any) -> bool:
    """Returns True if a vLLM worker uses cascade attention.

    vLLM's second model runner (vllm/v1/worker/gpu, seen in 0.27) has no cascade attention and no such attribute.
    """
    return bool(getattr(model_runner, "cascade_attn_enabled", False))


def logits_dtypes(model_runner: Any) -> list[str]:
    """Returns the dtype in which a rollout worker computes logits, per module that computes them; "" where vLLM or
    SGLang is too old to have a setting for it. A pipeline stage without a head has none."""
    found = [module for module in model_runner.model.modules() if type(module).__name__ == "LogitsProcessor"]
    if hasattr(model_runner, "server_args"):  # SGLang
        return ["float32" if getattr(module, "use_fp32_lm_head", False) else "" for module in found]
    return [str(getattr(module, "head_dtype", None) or "").removeprefix("torch.") for module in found]


def adapter(model_runner: Any) -> dict[str, Any] | None:
    """Returns how many adapters a vLLM worker has, how many of their weights it uses, and the names of the others.

    vLLM silently ignores an adapter's weights that match no module of the model: `activate_adapter` of
    vllm/lora/model_manager.py (0.27) looks up the model's modules in the adapter, not the other way round. The rollout
    then samples from another policy than the one trained (vLLM issues 34186 and 48019; SkyRL issue 1776 reports a gap
    that explodes only with a LoRA).

    None if the engine runs without LoRA. Several modules that vLLM keeps as one (q, k and v) count as one: their
    matching weights have its name by now.
    """
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        return None
    adapters, modules = manager._adapter_manager.list_adapters(), manager._adapter_manager.modules
    names = [name for each in adapters.values() for name in each.loras]
    unused = sorted(name for name in names if name not in modules)
    return {"adapters": len(adapters), "used": len(names) - len(unused), "unused": unused}
