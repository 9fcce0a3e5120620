"""verl's Megatron engine on CPU cores: stand-ins for the parts of CUDA that megatron-core, mbridge and Megatron-Bridge
use.

Each function is one change of `cpu.changes`: it checks that the code to be changed is the expected one, raises a
`PatchError` if not, and returns a function that undoes it. Only a process that builds a Megatron engine applies
`adapt_megatron`. `cpu.transformer_engine` has the layers.

Not supported: context parallelism; latent attention through mbridge, or over sequences that are not packed; gpt-oss,
whose experts have a bias and whose attention has sinks; LoRA, for which verl 0.9.1 calls functions (`create_peft`) that
Megatron-Bridge has only after 0.3.1.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from verl_ext.base.patching import Undo, apply_all, expect, moved, once, patch, wrap
from verl_ext.cpu.hollow import Finder, Torch
from verl_ext.cpu.patches import register_engines
from verl_ext.cpu.platform import stand_ins

CORE = "megatron.core"
# In these modules of megatron-core 0.16.1, tensors are made with device="cuda".
MAKE_ON_CUDA = (
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.cpu_offloading.hybrid_optimizer",
    "optimizer.grad_scaler",
    "pipeline_parallel.schedules",
    "transformer.moe.moe_utils",
    "utils",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.mapping",
    "dist_checkpointing.strategies.state_dict_saver",
)
# Packages that Megatron-Bridge 0.3 imports at the top of its modules, without checking that they are installed.
CUDA_PACKAGES = ("transformer_engine", "causal_conv1d", "mamba_ssm", "nvidia_resiliency_ext")


def allow_float32(engine_config: Any) -> Undo:
    """Allows dtype=float32, for exact comparisons: verl's McoreEngineConfig refuses it, but its engine can compute
    in it."""
    return wrap("allow_float32", engine_config.McoreEngineConfig, "__post_init__", _as_bfloat16, "self")


def _as_bfloat16(check: Callable[[Any], None], config: Any) -> None:
    dtype = config.dtype
    if dtype == "float32":
        object.__setattr__(config, "dtype", "bfloat16")
    try:
        check(config)
    finally:
        object.__setattr__(config, "dtype", dtype)


def adapt_engine(transformer_impl: Any) -> Undo:
    """Adapts verl's Megatron module to `cpu`, once it is imported; the rest waits until an engine is built."""
    return apply_all(
        lambda: register_engines("megatron"),
        lambda: wrap("install_megatron", transformer_impl.MegatronEngine, "__init__", _installed_first, "self, ..."),
    )


def _installed_first(build: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    adapt_megatron()
    build(engine, *args, **kwargs)


@once
def adapt_megatron() -> Undo:
    """Applies everything below, or nothing if one part does not fit. A second call applies nothing."""
    changes = [compile_nothing, call_no_cuda, make_on_cpu, split_on_cpu, keep_random_state, name_types_as_cuda]
    changes += [step_each_parameter, copy_for_offload, build_of_torch]
    if importlib.util.find_spec("megatron.bridge"):
        changes += [import_bridge, read_rope_parameters, refuse_unknown_overrides, scatter_dense]
    return apply_all(*changes)


def compile_nothing() -> Undo:
    """Switches compilation off: megatron-core's small functions take longer to compile than they ever run here."""
    torch.compiler.set_stance("force_eager")
    return lambda: torch.compiler.set_stance("default")


# torch.cuda


def _itself(module_or_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return module_or_tensor


def call_no_cuda() -> Undo:
    """Replaces functions of torch.cuda, which megatron-core, mbridge and verl call by name; its random state is the
    CPU's here."""
    return apply_all(
        *(partial(_call, name, value) for name, value in stand_ins().items()),
        lambda: patch("call_no_cuda", nn.Module, "cuda", _itself),
        lambda: patch("call_no_cuda", torch.Tensor, "cuda", _itself),
        lambda: patch("call_no_cuda", torch.Tensor, "pin_memory", _itself),
    )


def _call(name: str, function: Any) -> Undo:
    return patch("call_no_cuda", torch.cuda, name, function)


def _on_cpu(keywords: dict[str, Any]) -> None:
    if str(keywords.get("device")).startswith("cuda"):
        keywords["device"] = "cpu"
    keywords.pop("pin_memory", None)  # which torch refuses without an accelerator


def make_on_cpu() -> Undo:
    """Makes tensors on the CPU: some modules of megatron-core use device="cuda", whatever the parameters' device is.

    verl's module allocates the pinned memory that param_offload moves parameters to.
    """
    names = [*(f"{CORE}.{name}" for name in MAKE_ON_CUDA), "verl.utils.megatron_utils"]
    return apply_all(*(partial(_make, importlib.import_module(name)) for name in names))


def _make(module: ModuleType) -> Undo:
    return patch("make_on_cpu", module, "torch", Torch(_on_cpu))


def split_on_cpu() -> Undo:
    """Passes token counts to all_to_all as arrays: megatron-core does not convert a tensor that is on the CPU."""
    name = f"{CORE}.transformer.moe.token_dispatcher"
    expect("split_on_cpu", name, "maybe_move_tensor_to_cpu", "tensor, as_numpy, record_stream")
    return patch("split_on_cpu", importlib.import_module(name), "maybe_move_tensor_to_cpu", _counts)


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def keep_random_state() -> Undo:
    """Makes dropout and initialization of tensor parallel ranks fork the state of the CPU's generator instead of
    CUDA's."""
    name = f"{CORE}.tensor_parallel.random"
    random = importlib.import_module(name)
    expect("keep_random_state", name, "_get_cuda_rng_state", "device, clone, graph_safe")
    expect("keep_random_state", name, "_set_cuda_rng_state", "new_state, device, graph_safe")

    def get(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_to(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    return apply_all(
        lambda: patch("keep_random_state", random, "_get_cuda_rng_state", get),
        lambda: patch("keep_random_state", random, "_set_cuda_rng_state", set_to),
    )


def name_types_as_cuda() -> Undo:
    """Renames tensor types: megatron-core's optimizers compare Tensor.type() with "torch.cuda.FloatTensor" and
    refuse others."""
    optimizers = importlib.import_module(f"{CORE}.optimizer.optimizer")
    distributed = importlib.import_module(f"{CORE}.optimizer.distrib_optimizer")
    clipping = importlib.import_module(f"{CORE}.optimizer.clip_grads")

    def building(owner: type) -> Undo:
        return wrap("name_types_as_cuda", owner, "__init__", _with_cuda_names, "self, optimizer, ...")

    def clips(owner: ModuleType) -> Undo:
        name = "clip_grad_by_total_norm_fp32"
        return wrap("name_types_as_cuda", owner, name, _with_cuda_names, "parameters, max_norm, ...")

    return apply_all(
        lambda: building(distributed.DistributedOptimizer),
        lambda: building(optimizers.Float16OptimizerWithFloat16Params),
        lambda: clips(clipping),
        lambda: clips(optimizers),  # which imports it by name
    )


def _with_cuda_names(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    undo = wrap("name_types_as_cuda", torch.Tensor, "type", _cuda_name)
    try:
        return original(*args, **kwargs)
    finally:
        undo()


def _cuda_name(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = original(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


def step_each_parameter() -> Undo:
    """Adapts DistributedOptimizer to torch's Adam, which keeps a `step` for each parameter.

    Without Transformer Engine and Apex, megatron-core 0.16.1 reads that step before Adam has made one, so that no run
    can resume; it then gives all parameters one tensor, to which Adam adds once for each of them; and it loads the
    present step instead of the saved one.
    """
    owner = importlib.import_module(f"{CORE}.optimizer.distrib_optimizer").DistributedOptimizer
    put = "_set_main_param_and_optimizer_states"
    return apply_all(
        lambda: wrap("step_each_parameter", owner, "state_dict", _with_a_step, "self"),
        lambda: wrap("step_each_parameter", owner, "load_state_dict", _with_the_saved_step, "self, state_dict"),
        lambda: wrap("step_each_parameter", owner, put, _without_a_step, "self, model_param, tensors"),
    )


def _with_a_step(save: Callable[[Any], Any], optimizer: Any) -> Any:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            if "step" not in state:
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                state.update(moments, step=torch.tensor(0.0))
    return save(optimizer)


def _with_the_saved_step(load: Callable[[Any, Any], None], optimizer: Any, state_dict: Any) -> None:
    with torch.no_grad():  # the fp32 weights are views of leaves
        load(optimizer, state_dict)
    steps = {group["step"] for group in state_dict["optimizer"]["param_groups"] if "step" in group}
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.tensor(float(max(steps, default=0.0)))


def _without_a_step(put: Callable[..., None], optimizer: Any, model_param: Any, tensors: Any) -> None:
    """Removes the step: a checkpoint of one file for all layouts has none, and `load_state_dict` adds it."""
    put(optimizer, model_param, {"step": torch.tensor(0.0)} | tensors)


def copy_for_offload() -> Undo:
    """Copies the parameters for Adam: optimizer_cpu_offload makes copies on the CPU only of parameters that are not
    there already."""
    owner = importlib.import_module(f"{CORE}.optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    return wrap("copy_for_offload", owner, "_get_sub_optimizer_param_groups", _copies, "self, offload_fraction")


def _copies(original: Callable[..., Any], optimizer: Any, offload_fraction: float) -> tuple[Any, ...]:
    if offload_fraction != 1.0:
        raise NotImplementedError(f"optimizer_offload_fraction={offload_fraction} has no stand-in on CPU cores; set 1")
    groups, copy_of, original_of, in_float32 = [], {}, {}, {}
    for group in optimizer.param_groups:
        copies = [parameter.detach().clone().float() for parameter in group["params"]]
        for parameter, copy in zip(group["params"], copies, strict=True):
            copy_of[parameter], original_of[copy] = copy, parameter
            if parameter.dtype != torch.float32:
                in_float32[parameter] = copy
        groups.append(group | {"params": copies})
    return groups, [], copy_of, original_of, in_float32


# Transformer Engine and Megatron-Bridge


def build_of_torch() -> Undo:
    """Replaces TESpecProvider, from which megatron-core gets the layers of a decoder; mbridge and the Bridge require
    it."""
    from verl_ext.cpu import transformer_engine as layers

    specs = importlib.import_module(f"{CORE}.models.gpt.gpt_layer_specs")
    experts = importlib.import_module(f"{CORE}.models.gpt.moe_module_specs")
    block = importlib.import_module(f"{CORE}.transformer.transformer_block")
    moe_utils = importlib.import_module(f"{CORE}.transformer.moe.moe_utils")
    latent = importlib.import_module(f"{CORE}.transformer.multi_latent_attention")
    return apply_all(
        lambda: patch("build_of_torch", specs, "TESpecProvider", layers.TESpecProvider, new=True),
        lambda: patch("build_of_torch", experts, "TESpecProvider", layers.TESpecProvider),
        lambda: patch("build_of_torch", specs, "TENorm", layers.TENorm, new=True),
        lambda: patch("build_of_torch", latent, "TELinear", layers.TELinear),
        lambda: patch("build_of_torch", block, "LayerNormImpl", layers.TENorm),  # where one spec is for all layers
        lambda: patch(
            "build_of_torch", moe_utils, "te_general_gemm", None, new=True
        ),  # without it, the router uses its own code
    )


def import_bridge() -> Undo:
    """Imports Megatron-Bridge with hollow modules: it imports Transformer Engine and Mamba's kernels at its top, but a
    Qwen3-MoE needs none of them.

    megatron-core itself looks for Transformer Engine first: it must find none, and use its own code.
    """
    for name in ("models.gpt.gpt_model", "distributed", "optimizer", "inference", "extensions.transformer_engine"):
        importlib.import_module(f"{CORE}.{name}")
    finder = Finder(*CUDA_PACKAGES)
    patch("import_bridge", sys, "meta_path", [*sys.meta_path, finder])
    try:
        importlib.import_module("megatron.bridge")
    finally:
        sys.meta_path.remove(finder)
    return lambda: None  # imported modules stay


class RopeOfTransformers4:
    """A config of transformers 5 with the attributes that a config of transformers 4 has for rotary embeddings."""

    def __init__(self, config: Any) -> None:
        self._config, self._rope = config, config.rope_parameters or {}

    def __getattr__(self, name: str) -> Any:
        if name == "rope_scaling":
            return None if self._rope.get("rope_type", "default") == "default" else self._rope
        return self._rope[name] if name in self._rope else getattr(self._config, name)


def read_rope_parameters() -> Undo:
    """Reads `rope_parameters`: Megatron-Bridge 0.3 looks for `rope_theta`, and uses 10000 if it is missing, as in
    transformers 5.

    It then trains Qwen3 and GLM with other frequencies than their own, and stretches Moonlight's by YaRN's factor 40.
    Later versions (verl requires 0.5.2 on GPUs) read both.
    """
    owner = importlib.import_module("megatron.bridge.models.conversion.model_bridge").MegatronModelBridge
    return wrap("read_rope_parameters", owner, "hf_config_to_provider_kwargs", _with_rope, "self, hf_config")


def _with_rope(convert: Callable[[Any, Any], Any], bridge: Any, config: Any) -> Any:
    return convert(bridge, RopeOfTransformers4(config))


def refuse_unknown_overrides() -> Undo:
    """Refuses unknown names in `override_transformer_config`, like the method that verl calls in Megatron-Bridge 0.5.

    Without that method, verl sets any attribute, and a misspelt override silently has no effect.
    """
    owner = importlib.import_module("megatron.bridge.models.model_provider").ModelProviderMixin
    name = "apply_overrides_and_finalize"
    if hasattr(owner, name):
        raise moved("refuse_unknown_overrides", f"Megatron-Bridge has its own {name}")
    return patch("refuse_unknown_overrides", owner, name, _apply_overrides, new=True)


def _apply_overrides(provider: Any, dtype: torch.dtype, overrides: dict[str, Any]) -> None:
    given = {"params_dtype": dtype, "fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16} | overrides
    for name in given:
        if not hasattr(provider, name):
            raise AttributeError(f"{type(provider).__name__} has no attribute {name!r}.")
    vars(provider).update(given)
    provider.finalize()


def scatter_dense() -> Undo:
    """Makes scattered slices dense, as the copy to a GPU does: gloo sends the storage behind a slice."""
    return wrap("scatter_dense", torch.distributed, "scatter", _dense, "tensor, scatter_list, ...")


def _dense(scatter: Callable[..., Any], tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
    parts = scatter_list and [part.contiguous() for part in scatter_list]
    return scatter(tensor, parts, *args, **kwargs)
