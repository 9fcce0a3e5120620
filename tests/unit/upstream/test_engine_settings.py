"""The names of a LoRA that vLLM has no module for."""

from types import SimpleNamespace

from verl_ext.upstream.engine_settings import adapter


def runner(modules, *adapters):
    loras = {number: SimpleNamespace(loras=dict.fromkeys(names)) for number, names in enumerate(adapters)}
    manager = SimpleNamespace(modules=dict.fromkeys(modules), list_adapters=lambda: loras)
    return SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))


MODULES = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj")


def test_an_engine_without_lora_has_nothing_to_say():
    assert adapter(SimpleNamespace()) is None


def test_modules_without_weights_are_no_matter_and_names_without_a_module_are():
    assert adapter(runner(MODULES, MODULES[:2])) == {"adapters": 1, "used": 2, "unused": []}
    prefixed = [f"language_model.{name}" for name in MODULES]
    found = adapter(runner(MODULES, [*prefixed, MODULES[0]]))
    assert found == {"adapters": 1, "used": 1, "unused": sorted(prefixed)}
    assert adapter(runner(MODULES)) == {"adapters": 0, "used": 0, "unused": []}
