"""Which of verl_ext's hooks attach, by the checks that the run itself makes before Ray starts."""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from verl_ext.doctor.applied import applied
from verl_ext.doctor.context import MODEL, ROLLOUT, Context
from verl_ext.doctor.findings import Finding, check
from verl_ext.doctor.foreign import built_settings, unknown_targets
from verl_ext.doctor.validation import passes_quickly

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.errors import UserError

NAME = f"{ROLLOUT}.name"
FSDP_CONFIG = "actor_rollout_ref.actor.fsdp_config"
TRUST = f"{MODEL}.trust_remote_code"
MOST_ERRORS = 20  # in a row, each found once the one before is fixed


@check("config")
def config_composes(context: Context) -> Iterable[Finding]:
    """The overrides compose, and name the rollout engine.

    Source: verl/trainer/config/rollout/rollout.yaml (0.9.1), where rollout.name is `???`, Hydra's for mandatory.
    """
    if context.failure:
        yield Finding("error", context.failure, "nothing else of the run was looked at; correct what it names")
    if context.config is not None and not context.get(NAME):
        yield Finding("error", f"{NAME} is missing", "verl has no default for it", (f"{NAME}=vllm",))


@check("hooks")
def hooks(context: Context) -> Iterable[Finding]:
    """What the start-up table would show, or each error that would come instead.

    Source: `stability_config`, `features` and `check_run` of verl_ext, as `verl_ext.main_ppo.run` calls them;
    `check_run` also probes the model's routers, where that runs no code of the model's own.
    """
    if context.config is None or not context.get(NAME) or context.plugin_modules:
        return
    errors = errors_once(context)
    yield from errors
    if errors:
        return
    from verl_ext.launch.features import features
    from verl_ext.settings.stability import stability_config

    found = features(context.config, stability_config(context.config.stability))
    if not found:
        yield Finding("note", "nothing of stability.* is switched on", "verl runs as it is; see docs/methods.md")
    for feature in found:
        yield Finding("ok", f"{feature.name}: {feature.setting} ({feature.where})")


def errors_once(context: Context) -> list[Finding]:
    """The errors of the run's own checks, for those that would tell the same; none where plugins are not imported."""
    return context.once("errors", lambda: [] if context.plugin_modules else _errors(context))


def _errors(context: Context) -> list[Finding]:
    """The errors of a config, each found by fixing those before it."""
    from omegaconf import OmegaConf

    config, read_model = context.config, not context.model_code
    if context.get(TRUST) and not context.trust:
        config = copy.deepcopy(config)
        OmegaConf.update(config, TRUST, False)
    found: list[Finding] = []
    while len(found) < MOST_ERRORS and (error := _error(config, read_model)):
        config, fix = applied(config, error, lambda fixed: _error(fixed, read_model))
        said = " ".join(str(error).split())
        found.append(Finding("error", said, "the run would stop with this line before Ray starts", fix))
        if not fix:
            break
    return found


def _as_launched(config: "DictConfig") -> "DictConfig":
    """A config without errors, with what our entry point sets in it before verl gets it."""
    from verl_ext.launch.checks import apply_engine_settings
    from verl_ext.launch.features import features
    from verl_ext.settings.stability import stability_config

    config = copy.deepcopy(config)
    stability = stability_config(config.stability)
    if features(config, stability):
        apply_engine_settings(config, stability)
    return config


def _error(config: "DictConfig", read_model: bool) -> "UserError | None":
    """What the run would stop with; None where it would not."""
    from omegaconf.errors import OmegaConfBaseException

    from verl_ext.errors import UserError
    from verl_ext.launch.checks import check_run
    from verl_ext.launch.features import features
    from verl_ext.settings.stability import stability_config

    try:
        stability = stability_config(config.stability)
        if features(config, stability):
            check_run(config, stability, read_model=read_model)
    except UserError as error:
        return error
    except OmegaConfBaseException as error:
        return UserError(f"{error.full_key}: {str(error).splitlines()[0]}")
    return None


@check("verl's validation")
def verl_validation(context: Context) -> Iterable[Finding]:
    """What verl refuses in the config as our entry point leaves it.

    Source: `validate_config` of verl/utils/config.py (0.9.1), called as `verl_ext.main_ppo.run` calls it.
    """
    if context.config is None or not context.get(NAME) or context.plugin_modules or errors_once(context):
        return
    from omegaconf import OmegaConf

    if context.strategy == "megatron" and (engine := context.get(FSDP_CONFIG)):
        yield Finding("error", "actor.fsdp_config is set, and verl's Megatron engine has none", _instead(engine))
        return
    config = _as_launched(context.config)
    roles = {"use_reference_policy": needs_reference(config), "use_critic": needs_critic(config)}
    try:
        if not context.trust:
            built = built_settings(config)
            if unknown_targets(built):  # told by `code`
                return
            for path, values in built.items():  # what was looked at, and nothing that resolves to something else now
                OmegaConf.update(config, path, values, merge=False)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it says that it passes
            warnings.simplefilter("ignore")  # of what it would rather have
            if context.trust or not passes_quickly(config, **roles):  # a class of the run's own needs all of verl
                _verls_validation()(config, **roles)
    except Exception as error:  # assertions, ValueErrors and Hydra's wrapping of both
        cause = error.__cause__ or error
        said = " ".join(str(cause).split()) or type(cause).__name__
        yield Finding("error", said, "verl's own validation would stop the run with it")
        return
    yield Finding("ok", "verl's validate_config passes")


def _verls_validation() -> Callable[..., None]:
    import verl_ext.plugin  # noqa: F401 (before verl, as `verl_ext.main_ppo` does)

    return import_module("verl.utils.config").validate_config


def needs_reference(config: "DictConfig") -> bool:
    """`need_reference_policy` of verl/trainer/ppo/utils.py (0.9.1), whose import brings pandas and datasets along."""
    return bool(config.algorithm.get("use_kl_in_reward", False) or config.actor_rollout_ref.actor.use_kl_loss)


def needs_critic(config: "DictConfig") -> bool:
    """`need_critic`, of the same file."""
    enabled = config.critic.enable
    return bool(enabled) if enabled is not None else config.algorithm.adv_estimator == "gae"


def _instead(engine: "DictConfig") -> str:
    if engine.get("dtype") == "float16":
        return "use precision=fp16_megatron; precision=fp16 is for FSDP"
    return "leave out actor.fsdp_config and precision=bf16 or fp32, which set it; Megatron computes in bfloat16 without"
