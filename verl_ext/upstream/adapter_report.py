"""What vLLM made of the names of a LoRA that it was sent.

An adapter's weights that match no module of the model are kept and never used, without a word (`activate_adapter` of
vllm/lora/model_manager.py looks up the model's modules in the adapter, not the other way round; 0.27): the rollout
then samples from another policy than the one trained (vLLM issues 34186 and 48019; SkyRL issue 1776 is of a gap that
explodes with a LoRA alone).
"""

from typing import Any


def report(model_runner: Any) -> dict[str, Any] | None:
    """Over the adapters of one vLLM worker: how many modules have their weights, and the names that are not used.

    None where the engine runs without LoRA. Weights of several modules that vLLM keeps in one (q, k and v) count as
    one; those of them that matched stand under its name by now.
    """
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        return None
    adapters, modules = manager._adapter_manager.list_adapters(), manager._adapter_manager.modules
    names = [name for adapter in adapters.values() for name in adapter.loras]
    unused = sorted(name for name in names if name not in modules)
    return {"adapters": len(adapters), "used": len(names) - len(unused), "unused": unused}
