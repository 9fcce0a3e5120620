"""Reward shaping by length, for reward managers of one's own.

verl 0.9.1 has DAPO's soft overlong punishment in its reward manager `dapo`, on top of any reward function:

    reward.reward_manager.name=dapo
    +reward.reward_kwargs.max_resp_len=${data.max_response_length}
    +reward.reward_kwargs.overlong_buffer_cfg.enable=true
    +reward.reward_kwargs.overlong_buffer_cfg.len=4096
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.overlong_buffer_cfg.log=true

All four keys of `overlong_buffer_cfg` must be given (`log` adds `overlong_reward` and `overlong` to the metrics). It
cannot be done in a `reward.custom_reward_function`: verl tells that function the text, not its number of tokens.

Its length is the whole response, tool output included. Unlike the manager `naive`, it does not put `num_turns`,
`rollout_reward_scores` and the tools' extra fields into `extra_info`.
"""

from verl_ext.errors import ConfigError


def soft_overlong_punishment(length: int, max_length: int, cache_length: int) -> float:
    """What to add to the reward of a response of `length` tokens: 0, then linearly down to -1.

    "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv 2503.14476), eq. 13:

        0                                    length <= max_length - cache_length
        (max_length - cache_length - length) / cache_length     up to max_length
        -1                                   beyond

    verl's manager `dapo` has the same up to max_length, and goes on falling beyond it; no response of an agent loop is
    longer than `data.max_response_length`, so that the two differ only where `max_resp_len` is below that.

    Args:
        length, max_length, cache_length: tokens; the paper's L_max 20480 and L_cache 4096.

    Raises:
        ConfigError: not 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length:
        raise ConfigError(
            f"cache_length={cache_length} must be above 0 and at most max_length={max_length}: it is the "
            "stretch before max_length over which the punishment grows"
        )
    return max(-1.0, min(0.0, (max_length - cache_length - length) / cache_length))
