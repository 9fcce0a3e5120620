"""The installed engines' switches for reproducible results, for runs that expect no mismatch at all.

With its switch, an engine's results do not depend on what else is in a batch. `stability=zero_mismatch` measures
whether both engines then compute the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, note, ok
from verl_ext.doctor.precision import FSDP
from verl_ext.features.verl_config import ROLLOUT, RUNTIME, SGLANG_ARGUMENTS
from verl_ext.launch.packages import LAYERS, source

INVARIANT = f"{RUNTIME}.VLLM_BATCH_INVARIANT"  # full_determinism sets it too, but gives all responses one seed


@dataclass(frozen=True)
class Switch:
    """A switch of an engine.

    Attributes:
        engines: the values of rollout.name or actor.strategy for which the switch exists.
        package, file: the package and the file in it that have the switch.
        name: its name in that file.
        setting: the setting of a verl run that turns it on.
        does: its effect, a clause.
        value: the setting's value that turns it on.
    """

    engines: tuple[str, ...]
    package: str
    file: str
    name: str
    setting: str
    does: str
    value: str = "true"

    @property
    def where(self) -> str:
        return f"{self.name} ({self.package.replace('.', '/')}/{self.file})"

    def is_on(self, context: Context) -> bool:
        by_environment = self.setting == INVARIANT and context.environ.get(self.name, "0") not in ("", "0")
        return by_environment or str(context.get(self.setting)) not in ("None", "False", "none", "0")


SWITCHES = (
    Switch(
        ("vllm",),
        "vllm",
        "envs.py",
        "VLLM_BATCH_INVARIANT",
        INVARIANT,
        "vLLM's results no longer depend on what else is in the batch (GPUs of compute capability 9.0 or newer)",
        value="'1'",
    ),
    Switch(
        ("sglang",),
        "sglang",
        "srt/server_args.py",
        "enable_deterministic_inference",
        f"{SGLANG_ARGUMENTS}.enable_deterministic_inference",
        "SGLang's results no longer depend on what else is in the batch",
    ),
    Switch(
        ("sglang",),
        "sglang",
        "srt/server_args.py",
        "rl_on_policy_target",
        f"{SGLANG_ARGUMENTS}.rl_on_policy_target",
        "with the value fsdp, SGLang also rounds as transformers does (dense Qwen3 and a few other models)",
        value="fsdp",
    ),
    Switch(
        ("fsdp", "fsdp2"),
        "verl",
        "workers/config/engine.py",
        "full_determinism",
        f"{FSDP}.full_determinism",
        "torch's deterministic algorithms, and log-probs by log_softmax instead of flash-attn's kernel",
    ),
    Switch(
        ("megatron",),
        "megatron.core",
        "model_parallel_config.py",
        "deterministic_mode",
        f"{LAYERS}.deterministic_mode",
        "megatron-core picks deterministic code; Transformer Engine needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    ),
    Switch(
        ("megatron",),
        "megatron.core",
        "transformer/transformer_config.py",
        "batch_invariant_mode",
        f"{LAYERS}.batch_invariant_mode",
        "attention uses one split; the kernels of matrix products need set_batch_invariant_mode, which verl 0.9.1 does "
        "not call",
    ),
)


@check("zero mismatch", needs="config")
def zero_mismatch(context: Context) -> Iterable[Problem]:
    """The installed engines' switches for reproducible results, each on or off, for `stability=zero_mismatch`
    (`VLLM_BATCH_INVARIANT`, `enable_deterministic_inference`, `rl_on_policy_target`, training's `full_determinism`,
    `deterministic_mode`, `batch_invariant_mode`).

    Source: each switch's file, read on this machine. `enable_batch_invariant_mode` of
    vllm/model_executor/layers/batch_invariant.py (0.27.1); `_handle_deterministic_inference` of
    sglang/srt/server_args.py (0.5.12), whose `rl_on_policy_target` has one value, `fsdp`; `enable_full_determinism` of
    verl/workers/engine/utils.py (0.9.1); verl's Megatron engine reads no such setting; megatron-core 0.16.1, where only
    `set_batch_invariant_mode` installs the kernels. verl PR 7688 reached a k3 of 0 for DeepSeek-V4 with unreleased
    changes to vLLM (PR 54955) and Megatron-LM (PR 7050).
    """
    if not any(rule.get("locate") for rule in context.guard_rules):
        return
    if context.get("trainer.device") == "cpu":
        why = "the engines have no switches for CPU; in float32 both agree up to rounding (precision=fp32)"
        yield note("zero mismatch on CPU cores", why)
        return
    running = (context.get(f"{ROLLOUT}.name"), context.strategy)
    for switch in SWITCHES:
        folder = context.folder(switch.package)
        if folder is None or not any(engine in switch.engines for engine in running):
            continue
        if switch.name not in source(folder, switch.file):
            yield note(f"the installed {switch.package} has no {switch.where}", "another version may have it")
        elif switch.is_on(context):
            yield ok(f"{switch.where} is on: {switch.does}")
        else:
            yield note(f"{switch.where} is off", f"{switch.does}; ++{switch.setting}={switch.value}")
