"""The rollout engines that the plugin knows, by verl's `rollout.name`, as they call themselves."""

ROLLOUTS = {"vllm": "vLLM", "sglang": "SGLang"}
