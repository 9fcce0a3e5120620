"""FSDP2's engine under the name of one that the plugin does not know: `external_lib` imports this in verl's workers."""

from dataclasses import replace

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

NAME = "fsdp_turbo"  # verl's settings of FSDP take this one too; its own engine is for GPUs


@EngineRegistry.register(model_type="language_model", backend=NAME, device="cpu")
class OtherEngine(FSDPEngineWithLMHead):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, **kwargs):
        super().__init__(model_config, replace(engine_config, strategy="fsdp2"), optimizer_config, checkpoint_config)
