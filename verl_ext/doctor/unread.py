"""Settings of the launch that have no effect: verl reads them nowhere, or only beside another setting.

What nothing reads is found in the installed sources (`reads.py`). The tables have what a search for names cannot see;
their files of verl are those of 0.9.1.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, warning
from verl_ext.doctor.reads import read_of_its_engine, without_reader
from verl_ext.features.verl_config import (
    ACTOR,
    CORRECTION,
    MODE,
    REWARD_ARGUMENTS,
    ROLLOUT,
    key_of,
    value_of,
)
from verl_ext.launch.command_line import compose
from verl_ext.launch.names import GROUPS, MANAGER, known_names
from verl_ext.launch.packages import STRATEGY
from verl_ext.launch.refused import is_plain
from verl_ext.upstream.agent_loop import MANAGER as LOOPS

V1, ESTIMATOR = "trainer.use_v1", "algorithm.adv_estimator"
LOSS, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.optim"
SCHEDULE = f"{OPTIM}.lr_scheduler_type"
OLD_NAMES = {SCHEDULE: f"{OPTIM}.warmup_style"}  # which a class of verl copies to the new one
INSTEAD = {  # setting -> what verl reads in its place; "" if nothing
    f"{ACTOR}.grad_clip": f"{OPTIM}.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.ppo_max_token_len_per_gpu": "critic.ppo_infer_max_token_len_per_gpu",  # V1 takes it for updates, too
    f"{ROLLOUT}.repetition_penalty": "",  # agent_loop_tq.py of v1 sends 1.0 with each request
    f"{ACTOR}.fsdp_config.strategy": f"{ACTOR}.strategy",  # workers/config/actor.py overwrites it
    "critic.fsdp.strategy": "critic.strategy",
}


@dataclass(frozen=True)
class Beside:
    """Settings that verl reads only beside another one.

    Attributes:
        settings: a pattern of their names.
        switch: the setting that decides, and its values with which they are read; () for any that is not null.
        source: where verl reads them.
    """

    settings: str
    switch: str
    values: Collection[Any]
    source: str


READ_BESIDE = (
    Beside(f"{ACTOR}.kl_loss_(coef|type)", f"{ACTOR}.use_kl_loss", (True,), "workers/utils/losses.py"),
    Beside("algorithm.kl_(ctrl.*|penalty)", "algorithm.use_kl_in_reward", (True,), "v1/trainer_base.py"),
    Beside(f"{ACTOR}.fsdp_config.offload_policy", STRATEGY, ("fsdp2",), "engine/fsdp/transformer_impl.py"),
    Beside(f"{OPTIM}.(min_lr_ratio|num_cycles)", SCHEDULE, ("cosine",), "engine/fsdp/transformer_impl.py"),
    Beside(f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is", (), "rollout_corr_helper.py"),
    Beside(f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_rs", (), "rollout_corr_helper.py"),
    Beside(f"{LOSS}.clip_cov_.*", f"{LOSS}.loss_mode", ("clip_cov",), "core_algos.py"),
    Beside(f"{LOSS}.(kl_cov_ratio|ppo_kl_coef)", f"{LOSS}.loss_mode", ("kl_cov",), "core_algos.py"),
    Beside("algorithm.filter_groups.metric", "algorithm.filter_groups.enable", (True,), "v1/trainer_base.py"),
    Beside("reward.reward_model.model_path", "reward.reward_model.enable", (True,), "v1/trainer_base.py"),
    Beside("trainer.v1.separate_async..*", MODE, ("separate_async",), "v1/trainer_separate_async.py"),
    Beside("trainer.v1.colocate_async..*", MODE, ("colocate_async",), "v1/trainer_colocate_async.py"),
    Beside(f"{ROLLOUT}.trace..*", V1, (False,), "v1/agent_loop_tq.py turns it off for each sample"),
)


@check("unread settings", needs="config")
def unread_settings(context: Context) -> Iterable[Problem]:
    """Settings of the launch that nothing in this verl reads, such as `data.reward_fn_key`; that verl reads
    only beside another setting, such as `kl_loss_coef` without `use_kl_loss`; that another one replaces, such as
    `grad_clip`; `norm_adv_by_std_in_grpo` with an estimator other than grpo; an overlong buffer with a reward manager
    other than dapo, or above the length of all answers.

    Source: the installed sources of verl, searched for each name (`reads.py`); the table of verl_ext/doctor/unread.py.
    `compute_advantage` of ray_trainer.py passes norm_adv_by_std_in_grpo only to grpo. Of the managers in
    experimental/reward_loop/reward_manager, only dapo.py reads reward_kwargs.
    """
    settings = {*INSTEAD} & context.given
    if not context.entry and context.get(V1):
        settings |= {*without_reader(context.config, context.given)}
    for setting in sorted(settings):
        defaults = _defaults(context)
        value, usual = context.get(setting), value_of(defaults, setting)
        if value == usual or not (setting in INSTEAD or _is_changed(context, setting)):
            continue
        instead = INSTEAD.get(setting, read_of_its_engine(context.config, setting))
        if instead and value == context.get(instead):
            continue
        why = f"verl 0.9.1 reads {instead}" if instead else "verl's trainer V1 reads it nowhere"
        # Without a counterpart nothing does what was meant: a default would only hide that.
        fix = [f"{setting}={usual}"] if instead else []
        if instead and is_plain(value) and context.get(instead) == value_of(defaults, instead):  # else the user set it
            above, _, leaf = instead.rpartition(".")
            fix.append(f"{'' if leaf in value_of(defaults, above) else '++'}{instead}={value}")
        yield warning(f"{setting}={value} has no effect", why, *fix)
    yield from _without_its_switch(context)
    yield from _unused_penalty(context)
    kept = "algorithm.norm_adv_by_std_in_grpo"
    if context.get(kept) is False and context.get(ESTIMATOR) in ("grpo_vectorized", "gdpo"):
        why = "verl passes it only to grpo: these advantages are divided by the group's standard deviation"
        other = (f"{ESTIMATOR}=grpo",) if context.get(ESTIMATOR) != "gdpo" else ()
        yield warning(f"{kept}=False with {ESTIMATOR}={context.get(ESTIMATOR)}", why, *other)


def _without_its_switch(context: Context) -> Iterator[Problem]:
    """Yields settings of READ_BESIDE whose switch the launch does not mention: where it does, its author knows."""
    for row in READ_BESIDE:
        switch = context.get(row.switch)
        of_others = row.switch == V1 and (context.entry or context.get(LOOPS))  # another trainer, or its own loops
        is_set = {row.switch, OLD_NAMES.get(row.switch)} & context.given
        if of_others or is_set or (switch in row.values if row.values else switch is not None):
            continue
        names = [name for name in sorted(context.given) if re.fullmatch(row.settings, name)]
        if found := ", ".join(f"{name}={context.get(name)}" for name in names if _is_changed(context, name)):
            on = f"with {row.switch}={' or '.join(map(str, row.values))}" if row.values else f"if {row.switch} is set"
            why = f"verl reads it only {on} ({row.source})"
            yield warning(f"{found} has no effect", why)


def _is_changed(context: Context, name: str) -> bool:
    """Returns True if verl has a setting, and with another value than the launch."""
    value, defaults = context.get(name), _defaults(context)
    above, _, leaf = name.rpartition(".")
    return value is not None and leaf in (value_of(defaults, above) or ()) and value != value_of(defaults, name)


def _defaults(context: Context) -> Any:
    return _defaults_of_verl(tuple(one for one in context.overrides if key_of(one) in GROUPS))


@cache
def _defaults_of_verl(groups: tuple[str, ...]) -> Any:
    """Returns the config that these config groups alone give."""
    return compose(list(groups)).config or OmegaConf.create()


def _unused_penalty(context: Context) -> Iterator[Problem]:
    """Yields the penalty on long answers if its reward manager does not read it, or no answer is long enough for it."""
    buffer, limit = f"{REWARD_ARGUMENTS}.overlong_buffer_cfg", f"{REWARD_ARGUMENTS}.max_resp_len"
    manager, longest = str(context.get(MANAGER)), context.get("data.max_response_length", 0)
    if not context.get(f"{buffer}.enable"):
        return
    begins = context.get(limit, longest) - context.get(f"{buffer}.len", 0)
    if manager in known_names(MANAGER) - {"dapo"}:
        why = f"{MANAGER}={manager} does not read it, and long answers get no penalty; dapo reads it"
        yield warning(f"{buffer}.enable=True has no effect", why)
    elif manager == "dapo" and begins >= longest > 0 and context.get(limit) is not None:
        found = f"{limit}={context.get(limit)} with {buffer}.len={context.get(f'{buffer}.len')} has no effect"
        why = f"the penalty begins above {begins} tokens, and answers end at data.max_response_length={longest}"
        yield warning(found, why, f"++{limit}={longest}")
