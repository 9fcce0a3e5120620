"""Reads verl's own settings from a run's config, and checks what verl and megatron-core assert without a message.

Neither torch nor verl is imported, so that a launch, doctor and plan are fast. Written for verl 0.9.1.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.base.errors import ConfigError, Problem
from verl_ext.routing.engines import ACTOR, ENGINES, HOOKED

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
ROLLOUTS = {"vllm": "vLLM", "sglang": "SGLang"}  # rollout.name -> proper name of the engines that the plugin supports
VLLM_ARGUMENTS = f"{ROLLOUT}.engine_kwargs.vllm"
SGLANG_ARGUMENTS = f"{ROLLOUT}.engine_kwargs.sglang"
DISAGGREGATED = f"{ROLLOUT}.disaggregation.enabled"
MODE = "trainer.v1.trainer_mode"
CORRECTION = "algorithm.rollout_correction"  # verl's own
BYPASS = f"{CORRECTION}.bypass_mode"
FSDP_REPLAY = f"{ACTOR}.fsdp_config.router_replay.mode"  # verl's own name; its FSDP config leaves it out
REPLAY = "stability.replay"  # the same for every engine
REPLAY_MODES = ("disabled", "R2", "R3")
MTP = f"{MODEL}.mtp"
VIRTUAL_STAGES = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"
HYBRID = "actor_rollout_ref.hybrid_engine"
REWARD_ARGUMENTS = "reward.reward_kwargs"
RUNTIME = "ray_kwargs.ray_init.runtime_env.env_vars"  # the workers' environment
MERGE_LORA = f"++{MODEL}.lora.merge=true"
# Settings with which an update drops a part of the model, but compute_log_prob and the rollout do not.
DROPOUTS = (
    *(f"{ACTOR}.megatron.override_transformer_config.{part}_dropout" for part in ("hidden", "attention")),
    f"{MODEL}.lora.dropout",
)
# Training engine -> the setting of a LoRA's rank.
LORA_RANKS = {"fsdp": f"{MODEL}.lora_rank", "fsdp2": f"{MODEL}.lora_rank", "megatron": f"{MODEL}.lora.rank"}
# Text that Hydra's override grammar (hydra/grammar/OverrideLexer.g4, 1.3) reads as a string without quotes, unless it
# is one of the grammar's constants.
PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.-]*")
CONSTANTS = ("null", "true", "false", "inf", "nan")


def key_of(override: str) -> str:
    """Returns the setting of a Hydra override, without the signs before it."""
    return override.partition("=")[0].lstrip("+~")


def parse_override(override: str) -> tuple[str, Any]:
    """Returns the setting of a Hydra override and its value."""
    key = key_of(override)
    return key, OmegaConf.select(OmegaConf.from_dotlist([f"{key}={override.partition('=')[2]}"]), key)


def hydra_value(value: Any) -> str:
    """Returns a value in Hydra's grammar. A text is quoted if Hydra would otherwise read another type or a function."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{hydra_value(key)}:{hydra_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    if PLAIN.fullmatch(value) and value.lower() not in CONSTANTS:
        return value
    # Backslashes count before a quote, and nowhere else.
    quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{quoted}'"


def value_of(config: DictConfig, setting: str) -> Any:
    """Returns a setting's value; None if it is missing, or an interpolation that does not resolve, which verl's own
    validation reports."""
    try:
        return OmegaConf.select(config, setting)
    except OmegaConfBaseException:
        return None


# A setting whose value is not known has a resolver that records that it is read, whichever way a rule reads it.
UNKNOWN = "verl_ext.unknown"
_read: ContextVar[set[str]] = ContextVar(UNKNOWN)


def _read_unknown(setting: str, default: Any) -> Any:
    if (read := _read.get(None)) is not None:
        read.add(setting)
    return OmegaConf.create(default) if isinstance(default, dict | list) else default


OmegaConf.register_new_resolver(UNKNOWN, _read_unknown, replace=True)


def mark_unknown(config: DictConfig, setting: str) -> None:
    """Makes a config remember that a setting has verl's default, because its value in the run is not known. A setting
    that the config does not have stays away."""
    above, _, key = setting.rpartition(".")
    node = value_of(config, above) if above else config
    if OmegaConf.is_dict(node) and key in [*node]:  # `in` leaves out `???`
        plain = OmegaConf.to_container(node, throw_on_missing=False)[key]
        repeats = isinstance(plain, str) and re.fullmatch(r"\$\{[^}]*\}", plain)
        usual = "null" if plain == "???" else plain if repeats else hydra_value(plain)
        OmegaConf.update(config, setting, f"${{{UNKNOWN}:{hydra_value(setting)},{usual}}}", merge=False)


def is_unknown(config: DictConfig, setting: str) -> bool:
    """Returns True if `mark_unknown` marked a setting."""
    above, _, key = setting.rpartition(".")
    node = value_of(config, above) if above else config
    if not OmegaConf.is_dict(node) or not OmegaConf.is_interpolation(node, key):
        return False
    return str(OmegaConf.to_container(node)[key]).startswith(f"${{{UNKNOWN}:")


def repeats_another(config: DictConfig, setting: str) -> bool:
    """Returns True if a setting is an interpolation, by which it has the value of another setting."""
    above, _, key = setting.rpartition(".")
    return OmegaConf.is_interpolation(value_of(config, above), key) and not is_unknown(config, setting)


def judged(rule: Iterable[Problem]) -> Iterator[Problem]:
    """Yields the problems that a rule finds, each with the settings of unknown value that the rule has read so far. A
    rule inside the rule has recorded its own."""
    read, problems = set[str](), iter(rule)
    while True:
        outer = _read.set(read)
        try:
            problem = next(problems)
        except StopIteration:
            return
        finally:
            _read.reset(outer)
        yield replace(problem, unknown=tuple(sorted(read))) if problem.unknown is None else problem


def bypasses(config: DictConfig) -> bool:
    """Returns True if verl uses the rollout's log-probabilities as the training engine's.

    Its trainer copies `rollout_log_probs` to `old_log_probs` and does not call compute_log_prob. The policy loss is
    still that of `policy_loss.loss_mode`, so r = exp(l_theta - l_infer), which is k in the first pass of the update.
    """
    return bool(OmegaConf.select(config, BYPASS))


def verls_corrections(config: DictConfig) -> dict[str, Any]:
    """Returns setting -> value of those of verl's rollout corrections that are on."""
    found = {name: value_of(config, name) for name in (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs")}
    return {name: value for name, value in found.items() if value}


def ignores_advantages(config: DictConfig) -> bool:
    """Returns True if the loss uses no reward: `distillation_ppo_loss` of verl/trainer/distillation/losses.py."""
    node = OmegaConf.select(config, "distillation")
    return bool(node and node.get("enabled")) and not node.distillation_loss.use_task_rewards


def ignores_weights(config: DictConfig) -> bool:
    """Returns True if the loss uses neither a reward nor weights of tokens."""
    return ignores_advantages(config) and not config.distillation.distillation_loss.use_policy_gradient


def trainer_mode(config: DictConfig) -> str:
    return OmegaConf.select(config, MODE) or "sync"


def is_asynchronous(config: DictConfig) -> bool:
    """Returns True if a rollout may come from older weights than l_old."""
    return trainer_mode(config) != "sync"


def age_problems(config: DictConfig, asked: str, off: tuple[str, ...]) -> Iterator[Problem]:
    """Yields a problem for a setting that acts only on rollouts that are older than the policy, if there are none.

    Args:
        off: the overrides that leave it out.
    """
    if not is_asynchronous(config):
        found = f"{asked} acts on rollouts that are older than the policy, and with {MODE}=sync there are none"
        yield Problem(found, "", off, "train in an asynchronous mode", off)


def rollout_name(config: DictConfig) -> str:
    return OmegaConf.select(config, f"{ROLLOUT}.name") or "vllm"


def logprobs_mode(config: DictConfig) -> tuple[str, str]:
    """Returns the `logprobs_mode`, and the setting that decides it.

    It is an argument of vLLM; verl does not pass it to SGLang. For SGLang, our change to verl's server handles
    `processed_logprobs` as vLLM does; other modes leave the log-probabilities unchanged (upstream/sglang_server.py).
    """
    setting = f"{VLLM_ARGUMENTS}.logprobs_mode"  # overrides rollout.logprobs_mode
    if rollout_name(config) == "vllm" and (above := OmegaConf.select(config, setting)):
        return above, setting
    return OmegaConf.select(config, f"{ROLLOUT}.logprobs_mode") or "", f"{ROLLOUT}.logprobs_mode"


def top_k(config: DictConfig) -> int:
    """Returns the rollout's top_k; 0 for none."""
    return max(OmegaConf.select(config, f"{ROLLOUT}.top_k") or 0, 0)


def cuts(config: DictConfig) -> bool:
    """Returns True if the rollout samples from a part of the vocabulary."""
    return (OmegaConf.select(config, f"{ROLLOUT}.top_p") or 1) < 1 or top_k(config) > 0


def truncates(config: DictConfig) -> bool:
    """Returns True if the rollout's log-probabilities are normalised over the part of the vocabulary that it samples
    from. The training engine's must then be, too."""
    return rollout_name(config) in ROLLOUTS and cuts(config) and logprobs_mode(config)[0] == "processed_logprobs"


def drafts(config: DictConfig) -> bool:
    """Returns True if the rollout speculates with the model's own draft layers."""
    return all(OmegaConf.select(config, f"{MTP}.{name}") for name in ("enable", "enable_rollout"))


def passes_at_once(config: DictConfig) -> int:
    """Returns how many forward passes a rank makes together: the pipeline's stages if Megatron interleaves them, else
    1."""
    if strategy_of(config) != "megatron" or not OmegaConf.select(config, VIRTUAL_STAGES):
        return 1
    return int(config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size)


def strategy_of(config: DictConfig) -> str:
    """Returns the name of the training engine."""
    return OmegaConf.select(config, f"{ACTOR}.strategy") or "fsdp"


def verls_replay_setting(config: DictConfig) -> str:
    """Returns verl's setting of the replay mode on this run's engine."""
    return f"{ENGINES.get(strategy_of(config), ENGINES['fsdp']).settings}.router_replay.mode"


def replay_setting(config: DictConfig) -> str:
    """Returns the setting that decides the replay mode: ours if it is set, and verl's otherwise."""
    return REPLAY if OmegaConf.select(config, REPLAY) else verls_replay_setting(config)


def replay_mode(config: DictConfig) -> str:
    return OmegaConf.select(config, replay_setting(config)) or "disabled"


def replays_here(config: DictConfig) -> bool:
    """Returns True if we replay the routing, not verl, which does it on Megatron."""
    return strategy_of(config) in HOOKED and replay_mode(config) != "disabled"


def compares_in_update(config: DictConfig) -> bool:
    """Returns True if the experts of both engines can be compared in an update's own forward pass. On Megatron, the
    loss does not see the routers of other pipeline stages."""
    if strategy_of(config) != "megatron":
        return strategy_of(config) in HOOKED
    stages = OmegaConf.select(config, f"{ACTOR}.megatron.pipeline_model_parallel_size") or 1
    return stages == 1 and not OmegaConf.select(config, f"{ACTOR}.megatron.dynamic_context_parallel")


def needs_reference(config: DictConfig) -> bool:
    """Repeats `need_reference_policy` of verl/trainer/ppo/utils.py (0.9.1), which imports pandas and datasets too."""
    return bool(config.algorithm.get("use_kl_in_reward", False) or config.actor_rollout_ref.actor.use_kl_loss)


def needs_critic(config: DictConfig) -> bool:
    """Repeats `need_critic` of the same file."""
    enabled = config.critic.enable
    return bool(enabled) if enabled is not None else config.algorithm.adv_estimator == "gae"


def lora_rank_key(config: DictConfig) -> str:
    """Returns the setting in which this training engine reads a LoRA's rank; "" if it trains no LoRA: VeOmni's,
    TorchTitan's and Automodel's of verl 0.9.1 train all weights."""
    return LORA_RANKS.get(OmegaConf.select(config, f"{ACTOR}.strategy"), "")


def trains_lora(config: DictConfig) -> bool:
    """Returns True if the model is trained as a LoRA. FSDP reads lora_adapter_path only with a rank."""
    key = lora_rank_key(config)
    return bool(key) and _is_rank(OmegaConf.select(config, key))


def refers_to_actor(config: DictConfig) -> bool:
    """Repeats `ref_in_actor` of verl/trainer/ppo/v1/trainer_base.py: the reference is the actor without its adapter."""
    path = OmegaConf.select(config, f"{MODEL}.lora_adapter_path")
    return path is not None or any(_is_rank(OmegaConf.select(config, key)) for key in LORA_RANKS.values())


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def sends_adapter(config: DictConfig, engine: str = "vllm") -> bool:
    """Returns True if verl sends a LoRA to this rollout engine as an adapter: `lora_as_adapter` of verl's servers."""
    used = OmegaConf.select(config, f"{ROLLOUT}.name") == engine
    return used and trains_lora(config) and not OmegaConf.select(config, f"{MODEL}.lora.merge")


def json_of_model(path: str, name: str) -> dict[str, Any]:
    """Returns a JSON file of a model folder, or of a model in Hugging Face's cache; {} if there is none."""
    file: Any = Path(os.path.expanduser(path), name)
    if not file.parent.is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(path, name)
        except (ImportError, ValueError):  # no cache; not a model's name
            return {}
    if not isinstance(file, str | Path):
        return {}
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # loading the model reports it
        return {}
    return content if isinstance(content, dict) else {}


def model_json(config: DictConfig) -> dict[str, Any]:
    """Returns the model's config.json, read without running its code; {} if this machine does not have it."""
    path = OmegaConf.select(config, f"{MODEL}.path")
    return json_of_model(path, "config.json") if path else {}


def rollout_format(config: DictConfig) -> str:
    """Returns the format of the rollout's weights, as `diagnosis.levels` names it, or verl's name for other formats."""
    training = "megatron" if strategy_of(config) == "megatron" else "fsdp_config"
    qat = OmegaConf.select(config, f"{ACTOR}.{training}.qat")
    if qat and qat.get("enable"):
        return str(qat.get("mode"))
    argument = f"{ROLLOUT}.engine_kwargs.{rollout_name(config)}.quantization"
    asked = OmegaConf.select(config, argument) or OmegaConf.select(config, f"{ROLLOUT}.quantization")
    return str(asked or "bf16")


def hf_config_of(model: DictConfig) -> Any:
    """Returns the model's transformers config; None if this machine cannot read it (a remote path, no network, or no
    transformers)."""
    if not reads_models():
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=trusts_code(model))
    except OSError:
        return None
    except ValueError as error:
        check_folder(model)
        raise ConfigError(
            f"{MODEL}.path={model.path} has a config that transformers cannot read by itself: this version does not "
            f"know the architecture, or the model includes its own code, which {MODEL}.trust_remote_code=true allows"
        ) from error


def reads_models() -> bool:
    """Returns True if this environment has transformers. One that only checks launches reads no more of a model than
    its JSON files."""
    return find_spec("transformers") is not None


def trusts_code(model: DictConfig) -> bool:
    return bool(model.get("trust_remote_code"))


def is_folder_path(path: str) -> bool:
    """Returns True if a model's path can only be a folder: the Hub has NAME and OWNER/NAME, and URLs are remote."""
    return "://" not in path and (path.count("/") > 1 or path.startswith((".", "/", "~")))


def check_folder(model: Any) -> None:
    """Refuses a model folder on this machine that has no config.json; launch/files.py has those that do not exist."""
    path = os.path.expanduser(model.path)
    whole = model.get("hf_config_path") or os.path.isfile(os.path.join(path, "config.json"))
    if os.path.isdir(path) and not whole:
        raise ConfigError(
            f"{MODEL}.path={model.path} has no config.json, so it is not a model folder in Hugging Face's format; "
            "correct the path"
        )


def model_problems(model: DictConfig) -> Iterator[Problem]:
    """Checks that a model folder on this machine has a config and a tokenizer; other paths are left to verl."""
    check_folder(model)
    setting = "tokenizer_path" if model.get("tokenizer_path") else "path"
    path = os.path.expanduser(model[setting])
    if not os.path.isdir(path) or not reads_models():
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(path, trust_remote_code=trusts_code(model))
    except Exception as error:
        yield Problem(
            f"{MODEL}.{setting}={path} has no tokenizer that loads ({type(error).__name__})",
            otherwise=f"save one next to the model, or set {MODEL}.tokenizer_path",
        )


def overlong_problems(config: DictConfig) -> Iterator[Problem]:
    """Checks what verl's reward manager `dapo` would refuse only when it starts, or at the first scored answer.

    `verl/experimental/reward_loop/reward_manager/dapo.py` (0.9.1) reads each of them as an attribute, which OmegaConf
    refuses if the key is absent. `log: null` is read as false.
    """
    buffer, limit = f"{REWARD_ARGUMENTS}.overlong_buffer_cfg", f"{REWARD_ARGUMENTS}.max_resp_len"
    log = f"{buffer}.log"
    if OmegaConf.select(config, "reward.reward_manager.name") != "dapo":
        return
    if not OmegaConf.select(config, f"{buffer}.enable"):
        return
    usual = {limit: config.data.max_response_length, f"{buffer}.penalty_factor": 1.0}
    missing = [name for name in usual if OmegaConf.select(config, name) is None]
    if "log" not in OmegaConf.select(config, buffer):
        usual[log] = False
        missing.append(log)
    if missing:
        found = f"{' and '.join(missing)} must be set: verl's reward manager dapo reads them without a default"
        yield Problem(found, fix=tuple(f"++{name}={usual[name]}" for name in missing))
    length, most = (OmegaConf.select(config, name) for name in (f"{buffer}.len", limit))
    if length is None or length <= 0 or (most is not None and length > most):
        # DAPO has 4096 of 20480 tokens.
        fifth = (f"{buffer}.len={most // 5}",) if isinstance(most, int) and most >= 5 else ()
        yield Problem(
            f"{buffer}.len={length} must be above 0 and at most {limit}={most}: it is the number of tokens before the "
            "limit over which the penalty grows",
            fix=fifth,
            leave_out=fifth,
        )


def warmup_problems(config: DictConfig) -> Iterator[Problem]:
    """Checks that the warm-up ends before the learning-rate schedule: megatron-core asserts it without a message."""
    actor, steps = config.actor_rollout_ref.actor, config.trainer.total_training_steps
    warmup = actor.optim.get("lr_warmup_steps") or 0
    if actor.strategy != "megatron" or steps is None or actor.optim.get("lr_decay_steps") is not None:
        return
    if warmup >= steps:
        setting = f"{ACTOR}.optim.lr_warmup_steps"
        yield Problem(
            f"{setting}={warmup} must be below trainer.total_training_steps={steps} with {ACTOR}.strategy=megatron",
            fix=(f"{setting}=0",),
            otherwise="train for more steps",
        )
