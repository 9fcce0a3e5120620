"""verl's real SGLang server class around a tokenizer manager of the test's own; without SGLang, over stand-ins for the
modules that verl imports of it."""

import asyncio
import contextlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

VERLS = "verl.workers.rollout.sglang_rollout"
INSTALLED = importlib.util.find_spec("sglang") is not None
if INSTALLED:
    importlib.import_module("verl_ext.cpu.sglang")  # which prepares this process for it
# As verl 0.9.1 imports them at the top of its modules.
IMPORTED = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.entrypoints": (),
    "sglang.srt.entrypoints.engine": (),
    "sglang.srt.entrypoints.EngineBase": ("EngineBase",),
    "sglang.srt.entrypoints.http_server": ("ServerArgs", "_GlobalState", "app", "launch_server"),
    "sglang.srt.managers": (),
    "sglang.srt.managers.io_struct": (
        "ContinueGenerationReqInput",
        "PauseGenerationReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightsFromTensorReqInput",
    ),
    "sglang.srt.managers.tokenizer_manager": ("ServerStatus",),
    "sglang.srt.server_args": ("ServerArgs",),
    "sglang.srt.utils": (
        "MultiprocessingSerializer",
        "assert_pkg_version",
        "is_cuda",
        "kill_process_tree",
        "set_prometheus_multiproc_dir",
        "set_ulimit",
    ),
    "sglang.srt.weight_sync": (),
    "sglang.srt.weight_sync.utils": ("_preprocess_tensor_for_update_weights", "update_weights"),
}


@contextlib.contextmanager
def verls_server_module():
    """verl's async_sglang_server, imported anew, as a process that loads the plugin has it."""
    if INSTALLED:
        importlib.import_module(f"{VERLS}.async_sglang_server")  # SGLang's own modules stay: they are imported once
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.startswith(VERLS)]:
            del sys.modules[name]
        if not INSTALLED:
            sys.modules.update(_stand_ins())
        yield importlib.import_module(f"{VERLS}.async_sglang_server")


def _stand_ins():
    modules = {name: ModuleType(name) for name in IMPORTED}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        for attribute in IMPORTED[name]:
            setattr(module, attribute, type(attribute, (), {}))
        module.__path__ = []
    modules["sglang.srt.entrypoints.http_server"].set_global_state = lambda global_state: None
    modules["sglang.srt.managers.io_struct"].GenerateReqInput = SimpleNamespace
    return modules


def server(module, manager, prompt_length=8, response_length=8):
    """One of verl's servers after launch_server, whose last step before serving is set_global_state."""
    made = object.__new__(module.SGLangHttpServer)
    made.tokenizer_manager = manager
    made.config = SimpleNamespace(
        max_model_len=prompt_length + response_length + 1,
        prompt_length=prompt_length,
        response_length=response_length,
        enable_rollout_routing_replay=True,
        skip_tokenizer_init=True,
        mtp=None,
        logprobs_mode="processed_logprobs",
    )
    made.model_config = SimpleNamespace(lora_rank=0, lora={})
    made.replica_rank, made.node_rank, made.global_steps, made._disaggregation_role = 0, 0, 3, "null"
    module.set_global_state(SimpleNamespace(tokenizer_manager=manager))
    return made


def generated(module, manager, prompt, **sampling):
    """Returns the answer of a server around this manager to a prompt."""
    return asyncio.run(server(module, manager).generate(list(prompt), {"logprobs": True} | sampling, "request"))
