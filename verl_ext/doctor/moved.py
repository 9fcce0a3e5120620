"""Settings of older versions of verl, and where verl 0.9.1 reads them."""

from omegaconf import DictConfig, OmegaConf

from verl_ext.features.verl_config import ACTOR, ROLLOUT

# Old place of a setting -> its place now, "" if there is none; the longest match counts.
MOVED = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.model": "",  # only the path has a new place
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model": "reward.reward_model",
    "sandbox_fusion": "reward.sandbox_fusion",
    "critic.model.fsdp_config": "critic.fsdp",
    "critic.model.fsdp_config.grad_offload": "",
    f"{ACTOR}.loss_mode": f"{ACTOR}.policy_loss.loss_mode",
    f"{ROLLOUT}.n_agent": f"{ROLLOUT}.n",
    f"{ROLLOUT}.n_val": f"{ROLLOUT}.val_kwargs.n",
    f"{ROLLOUT}.val_temperature": f"{ROLLOUT}.val_kwargs.temperature",
}
FREE = "reward.reward_kwargs."  # verl's config does not list what a reward manager takes


def new_place(setting: str, config: DictConfig | None = None) -> str:
    """Returns where verl 0.9.1 reads an old setting; "" if nowhere, or if it is not in the table.

    Args:
        config: if given, the place must be in it: below a place of the table, a fork of verl may have more.
    """
    old = max((one for one in MOVED if setting == one or setting.startswith(f"{one}.")), key=len, default="")
    place = MOVED[old] + setting.removeprefix(old) if old and MOVED[old] else ""
    if config is None or not place or place.startswith(FREE):
        return place
    node, _, key = place.rpartition(".")
    parent = OmegaConf.select(config, node)
    return place if OmegaConf.is_dict(parent) and key in parent else ""


def is_plain(value: object) -> bool:
    """Returns True if a value may be part of a fix: a number, a bool or a name, but no other text of the config."""
    return isinstance(value, bool | int | float) or (value is not None and str(value).isidentifier())
