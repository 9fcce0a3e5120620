"""What of a run is trained, and what is left of it: the adapter, checkpoints, what fits in an answer.

The files of verl are those of 0.9.1.
"""

from collections.abc import Iterable
from contextlib import suppress
from math import ceil
from pathlib import Path

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, error, note, warning
from verl_ext.features.verl_config import (
    ACTOR,
    LORA_RANKS,
    MODEL,
    ROLLOUT,
    VLLM_ARGUMENTS,
    json_of_model,
    lora_rank_key,
    needs_critic,
    trains_lora,
)
from verl_ext.launch.packages import vision_modules

FULL_RATE = 2e-6  # up to here a learning rate is one for all weights; verl's default is 1e-6
RATE, ALL_LINEAR = f"{ACTOR}.optim.lr", f"{MODEL}.target_modules"
ADAPTED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
SAVED, LOADED = (f"{ACTOR}.checkpoint.{name}_contents" for name in ("save", "load"))
FREQUENCY = "trainer.save_freq"
ASYNCHRONOUS = f"{ACTOR}.checkpoint.async_save"
TOOLS = f"{ROLLOUT}.multi_turn"
TEACHERS = "distillation.teacher_models"
CHARACTERS = 4  # of a token
THINKS, SHORT = ("qwen3", "qwen3_moe"), 1024  # models that think unless they are told not to; tokens that cut that
OTHERS = ("instruct", "base", "coder", "embedding", "reranker")  # words of names of models that do not think
THINKING = "data.apply_chat_template_kwargs.enable_thinking"
# Words of a model's name -> verl's parser of its tool calls, where it is not the default one, hermes.
FORMATS = {
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "gpt-oss": "gpt-oss",
    **{f"glm-4.{minor}": "glm" for minor in (5, 6, 7)},
    "kimi-k2": "kimi",
    "minimax-m2": "minimax",
    "seed-oss": "seed",
    "deepseek-v4": "deepseek_v4",
    "gemma-4": "gemma4",
}


@check("adapter", needs="config")
def trained_adapter(context: Context) -> Iterable[Problem]:
    """A LoRA whose rank stands where this engine does not read it, so that all weights are trained; one with a learning
    rate for all weights; one on modules that the rollout does not take, on FSDP: routers and stacked experts, or the
    vision tower.

    Source: `_is_lora` of workers/engine/fsdp/transformer_impl.py reads model.lora_rank, megatron's model.lora (verl PR
    4063); veomni's, torchtitan's and automodel's have a TODO. verl's docs/advance/ppo_lora.rst: a rate ten times as
    large. peft 0.21 gives adapters to the stacked experts of ADAPTED (tried on Qwen3-MoE), which vLLM does not load
    under these names (vllm PR 52194). Without `enable_tower_connector_lora`, vLLM gives only the language model
    adapters (`LoRAModelManager` of lora/model_manager.py; verl issue 3516).
    """
    read = lora_rank_key(context.config)
    for key in dict.fromkeys(LORA_RANKS.values()):
        rank = context.number(key)
        if key != read and rank and rank > 0 and not (read and context.get(read)):
            why = f"{context.strategy} reads {read or 'none'}: all weights are trained, at a LoRA's learning rate"
            moved = [f"{read}={rank:g}"] if read else []
            yield error(f"{key}={rank:g} is not read", why, *moved, f"{key}=0")
    if not trains_lora(context.config):
        return
    if (rate := context.number(RATE)) is not None and rate <= FULL_RATE:
        why = "that is a rate for all weights, with which an adapter hardly moves; about ten times as much is usual"
        yield warning(f"a LoRA with {RATE}={rate:g}", why, f"{RATE}={10 * rate:g}")
    sent_whole = context.get(f"{MODEL}.lora.merge") or context.get(f"{MODEL}.exclude_modules")
    if not context.on_fsdp or sent_whole:
        return
    asked, modules = context.get(ALL_LINEAR), vision_modules(context.model_type)
    listed = set() if isinstance(asked, str) else {str(name).rpartition(".")[2] for name in asked or ()}
    in_tower = sorted(modules if asked == "all-linear" else modules & listed) if context.with_vllm else []
    if context.model_type in ADAPTED and asked == "all-linear":
        why = "the router and the stacked experts get adapters too, which the rollout does not load as they are sent"
        yield warning("target_modules=all-linear with experts", why, f"{ALL_LINEAR}=[q_proj,k_proj,v_proj,o_proj]")
    elif in_tower and not context.get(f"{VLLM_ARGUMENTS}.enable_tower_connector_lora"):
        why = f"{', '.join(in_tower)} of the vision tower get adapters too, which vLLM leaves out"
        yield note(
            f"target_modules={asked} with a vision tower", f"{why}; {MODEL}.exclude_modules=.*vis.* leaves it out"
        )


@check("token ids", needs="config")
def token_ids(context: Context) -> Iterable[Problem]:
    """A critic, or a teacher of a distillation, of another tokenizer than the actor's, whose token ids it is given.

    Source: `_compute_values` of v1/trainer_base.py; experimental/teacher_loop/teacher_manager.py: both pass the
    actor's ids on, and nothing encodes them again (TRL issue 3595, TRL PR 4561).
    """
    readers = ["critic.model.path"] if needs_critic(context.config) else []
    if context.get("distillation.enabled"):
        readers += [f"{TEACHERS}.{name}.model_path" for name in context.get(TEACHERS, ())]
    own = str(context.get(f"{MODEL}.tokenizer_path") or context.model_path or "")
    for setting in readers:
        paths = own, str(context.get(setting, own))
        ids = [json_of_model(path, "tokenizer.json").get("model", {}).get("vocab") for path in paths]
        if all(ids) and ids[0] != ids[1]:
            why = "their tokenizers differ: the actor's token ids mean other tokens in it, or none"
            yield warning(f"{setting}={paths[1]} with {own}", why)


@check("checkpoints", needs="config")
def checkpoints(context: Context) -> Iterable[Problem]:
    """Checkpoints that a restart does not find (verl issue 7952), or that do not bring the weights back;
    `val_only` that trains. A note: nothing is saved.

    Source: verl issue 7952, PR 7955 (open): the file that names the last asynchronous checkpoint is written only for
    Megatron (v1/trainer_base.py), so a restarted run starts at step 0. `fit` there saves, also in the last step, only
    if save_freq > 0, and reads val_only inside `if val_before_train` (verl issue 4534, PR 2084). `should_load_model` of
    utils/checkpoint/checkpoint_manager.py reads load_contents; `_load_checkpoint` takes the step over in any case.
    """
    if context.get("trainer.val_only") and not context.get("trainer.val_before_train"):
        why = "verl reads val_only only before the first step: this launch trains"
        yield error("val_only=true without val_before_train", why, "trainer.val_before_train=true")
    if context.get("trainer.val_only"):
        return
    if context.get(ASYNCHRONOUS) and not context.on_megatron:
        why = "a restart begins again at step 0"
        yield warning(f"{ASYNCHRONOUS}=True on {context.strategy}", why, f"{ASYNCHRONOUS}=False")
    if (often := context.number(FREQUENCY)) is not None and often <= 0:
        yield note(f"{FREQUENCY}={often:g}", "nothing is saved, not even after the last step")
    loaded, weights = context.get(LOADED, ["model"]), {"model", "hf_model"} if context.on_megatron else {"model"}
    if not weights & set(loaded) and context.get("trainer.resume_mode") != "disable":
        why = "a restart goes on at the step of the checkpoint with the weights of the start"
        chosen = LOADED if list(loaded) != list(context.get(SAVED, loaded)) else SAVED
        yield warning(f"{LOADED} has no model", why, f"{chosen}=[model,optimizer,extra]")


@check("length of the run", needs="config")
def length_of_the_run(context: Context) -> Iterable[Problem]:
    """`total_training_steps` that the epochs do not reach, so that the last step, its checkpoint and its validation
    never come (verl PR 7516). The number of prompts is that of data.train_max_samples, or of the
    data's parquet files if they are here.

    Source: `_init_dataloader` and `fit` of v1/trainer_base.py: an epoch has as many steps as whole batches, and
    `is_last_step` is true at total_training_steps only.
    """
    if context.get("trainer.val_only") or context.get("data.custom_cls.path"):  # whose length is its own
        return
    prompts, batch = _prompts(context), context.number("data.train_batch_size")
    epochs, steps = context.number("trainer.total_epochs"), context.number("trainer.total_training_steps")
    if prompts is None or not batch or batch < 1 or epochs is None:
        return
    of_an_epoch = prompts // int(batch)
    if steps is not None and of_an_epoch and of_an_epoch * epochs < steps:
        made = f"{prompts} prompts make {of_an_epoch * epochs:g} steps"
        why = f"{made}, and the last one, its checkpoint and its validation never come"
        found = f"trainer.total_training_steps={steps:g} with total_epochs={epochs:g}"
        given = "trainer.total_epochs" in context.given  # then nobody knows which of the two was meant
        yield warning(found, why, *([] if given else [f"trainer.total_epochs={ceil(steps / of_an_epoch)}"]))


def _prompts(context: Context) -> int | None:
    """Returns the number of training prompts; None if it is not known."""
    files = context.get("data.train_files", ())
    paths = [Path(str(file)).expanduser() for file in ([files] if isinstance(files, str) else files)]
    rows = None
    if paths and all(path.suffix == ".parquet" and path.is_file() for path in paths):
        with suppress(ImportError, OSError, ValueError):  # pyarrow's errors are ValueErrors
            from pyarrow.parquet import read_metadata

            rows = sum(read_metadata(path).num_rows for path in paths)
    at_most = context.number("data.train_max_samples")
    known = [int(one) for one in (rows, at_most) if one is not None and one >= 0]
    return min(known, default=None)


@check("room for an answer", needs="config")
def room_for_an_answer(context: Context) -> Iterable[Problem]:
    """A tool's response that alone is longer than the answer may be; prompts above the limit, which lose their
    beginning whatever data.truncation says. A note: a model that thinks by default, and few tokens.

    Source: `_handle_processing_tools_state` of experimental/agent_loop/tool_agent_loop.py: the limit holds for all
    turns and tool responses together (verl issue 3619); agent_loop.py keeps `prompt_ids[-prompt_length:]`, and nothing
    reads `truncation` of utils/dataset/rl_dataset.py (verl issue 3948).
    """
    room = context.number("data.max_response_length") or 0
    longest = context.number(f"{TOOLS}.max_tool_response_length") or 0
    if _has_tools(context) and longest >= CHARACTERS * room > 0:
        why = f"that is the whole answer, of at most {room} tokens with all its turns: it ends without a result"
        fits = f"{TOOLS}.max_tool_response_length={room}"
        yield warning(f"a tool's response of up to {longest} characters", why, fits)
    thinks = context.model_type in THINKS and not any(word in _model(context) for word in OTHERS)
    if thinks and room <= SHORT and context.get(THINKING) is not False:
        why = "it thinks by default, and most of its answers would be cut, and scored as they are"
        way = "" if "thinking" in _model(context) else f"++{THINKING}=false, or "
        why = f"{why}: {way}more tokens"
        yield note(f"max_response_length={room} with {context.model_path}", why)
    if not context.get("data.filter_overlong_prompts") and context.get("data.truncation") in ("right", "middle"):
        why = "verl keeps the end of a prompt that is too long, whatever data.truncation says"
        yield warning("prompts lose their beginning", why, "data.filter_overlong_prompts=true")


@check("tool calls", needs="config")
def tool_calls(context: Context) -> Iterable[Problem]:
    """Tools whose calls verl's parser does not find, because the model writes them in another format; or one turn only.

    Source: experimental/agent_loop/tool_parser.py, its registered formats; a call that does not parse ends the
    trajectory (tool_agent_loop.py), as does `max_assistant_turns`, before a call is parsed.
    """
    if not _has_tools(context):
        return
    given = context.get(f"{TOOLS}.format")
    own = next((known for words, known in FORMATS.items() if words in _model(context)), given)
    if given != own and given in {"hermes", *FORMATS.values()}:
        why = f"{context.model_path} writes its calls in another format, so that no tool is ever called"
        yield warning(f"{TOOLS}.format={given}", why, f"{TOOLS}.format={own}")
    if context.get(f"{TOOLS}.max_assistant_turns") == 1:
        why = "an answer ends after its first turn, before a call in it is parsed"
        yield warning(f"{TOOLS}.max_assistant_turns=1 with tools", why, f"{TOOLS}.max_assistant_turns=null")


def _has_tools(context: Context) -> bool:
    """Returns True if verl's own loop has tools; another loop need not read their settings."""
    own = context.get(f"{ROLLOUT}.agent.default_agent_loop") in ("tool_agent", "single_turn_agent", None)
    return own and any(context.get(f"{TOOLS}.{name}") for name in ("tool_config_path", "function_tool_path"))


def _model(context: Context) -> str:
    return str(context.model_path or "").lower().replace("_", "-")
