"""An agent loop manager of one's own: all that verl asks of one is that it fills TransferQueue.

It runs none of verl's agent loops, workers and outputs, as `AgentFrameworkRolloutAdapter` of uni-agent.
"""

import asyncio
from uuid import uuid4

import ray
import torch
import transfer_queue as tq
from verl.utils import hf_tokenizer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class OwnManager:
    """What `++actor_rollout_ref.rollout.agent.agent_loop_manager_class` names."""

    def __init__(self, generator):
        self.generator = generator

    @classmethod
    def create(cls, *, config, llm_client, **_):
        return cls(ray.remote(Generator).remote(config, llm_client))

    def generate_sequences(self, prompts):
        self.generator.generate_sequences.remote(prompts)


class Generator:
    """Generates n answers to each prompt, in one turn; an answer's reward is its last token's id, modulo 10."""

    def __init__(self, config, llm_client):
        tq.init()
        self.rollout, self.client = config.actor_rollout_ref.rollout, llm_client
        self.tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)

    async def generate_sequences(self, prompts):
        step = prompts["global_steps"]
        pairs = zip(prompts["uid"], prompts["raw_prompt"], strict=True)
        await asyncio.gather(*(self._fill(uid, list(messages), step) for uid, messages in pairs))

    async def _fill(self, uid, messages, step):
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answers = await asyncio.gather(*(self._answer(prompt) for _ in range(self.rollout.n)))
        fields = [
            answer | {"uid": uid, "num_turns": torch.tensor(2), "session_id": n} for n, answer in enumerate(answers)
        ]
        sizes = [(len(one["prompts"]), len(one["responses"])) for one in fields]
        versions = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), step)
        await tq.async_kv_batch_put(
            keys=[f"{uid}_{n}_0" for n in range(len(fields))],
            fields=list_of_dict_to_tensordict(fields),
            tags=[
                {"status": "success", "prompt_len": p, "response_len": r, "seq_len": p + r, **versions}
                for p, r in sizes
            ],
            partition_id="train",
        )
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    async def _answer(self, prompt):
        sampling = {"temperature": self.rollout.temperature, "logprobs": True}
        output = await self.client.generate(uuid4().hex, prompt_ids=prompt, sampling_params=sampling)
        response = torch.tensor(output.token_ids)
        mask, input_ids = torch.ones_like(response), torch.tensor([*prompt, *output.token_ids])
        routes = torch.zeros(len(input_ids), *output.routed_experts.shape[1:], dtype=torch.uint8)
        routes[: len(output.routed_experts)] = torch.tensor(output.routed_experts)  # the last token has no row
        rewards = torch.zeros(len(response))
        rewards[-1] = output.token_ids[-1] % 10 / 10
        return {
            "prompts": torch.tensor(prompt),
            "responses": response,
            "response_mask": mask,
            "loss_mask": mask,
            "input_ids": input_ids,
            "position_ids": torch.arange(len(input_ids)),
            "multi_modal_inputs": {},
            "rollout_log_probs": torch.tensor(output.log_probs),
            "routed_experts": routes,
            "rm_scores": rewards,
        }
