"""Model shapes, published or read from config.json, and numbers derived from them: parameters, active parameters, bytes
of KV cache per token.

The published numbers are copies of those in each model's config.json on Hugging Face; `source` names where the copy was
read. tests/unit/recipes/test_cluster_recipes.py compares the resulting parameters with the published ones. Not counted
are norms and biases, below 0.1 %, and the layers for multi-token prediction, which the recipes do not train.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext.base.errors import ConfigError
from verl_ext.features.verl_config import MODEL, json_of_model


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention; the cache holds the compressed keys and values and one rotary part for all heads.

    Attributes:
        q_lora_rank: None if queries are not compressed.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cached(self) -> int:
        """Numbers per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def parameters(self, hidden: int, heads: int) -> int:
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = hidden * query if self.q_lora_rank is None else self.q_lora_rank * (hidden + query)
        decompression = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + hidden * self.cached + decompression + heads * self.v_head_dim * hidden


@dataclass(frozen=True)
class LinearAttention:
    """Gated DeltaNet, whose state does not grow with the sequence."""

    layers: int
    key_heads: int
    value_heads: int
    head_dim: int
    kernel: int

    def parameters(self, hidden: int) -> int:
        keys, values = self.key_heads * self.head_dim, self.value_heads * self.head_dim
        gates = 2 * hidden * self.value_heads
        return hidden * (2 * keys + 2 * values) + gates + (2 * keys + values) * self.kernel + values * hidden


@dataclass(frozen=True)
class ModelShape:
    """A decoder, dense or a mixture of experts.

    Attributes:
        source: the Hugging Face repository, and where its numbers were read.
        dense_layers: number of first layers without a router; all layers of a dense model.
        head_dim: size of a head's queries, keys and values; unused with `mla`.
        moe_intermediate: width of one routed expert.
        shared_experts: number of shared experts, each as large as a routed expert.
        dense_intermediate: width of the dense layers; 0 if there are none.
        window_layers: number of layers with sliding-window attention, whose cache stops growing at the window.
        output_gate: attention multiplies its output by a gate as large as the queries.
    """

    source: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dense_layers: int = 0
    routed_experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    moe_intermediate: int = 0
    dense_intermediate: int = 0
    tied_embeddings: bool = False
    mla: Mla | None = None
    linear: LinearAttention | None = None
    window_layers: int = 0
    output_gate: bool = False

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input and output embeddings, counted once if they are tied."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts, which expert parallelism splits."""
        return self.moe_layers * self.routed_experts * 3 * self.hidden * self.moe_intermediate

    @property
    def parameters(self) -> int:
        return self._with_experts(self.routed_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes, all embeddings included. Some publishers leave embeddings out."""
        return self._with_experts(self.top_k)

    def cached_numbers(self, ranks: int) -> int:
        """Returns how many numbers of a token each rank of tensor parallelism caches, over all layers whose cache grows
        with the sequence.

        A rank has at least one key-value head, and compressed keys and values (MLA) are whole on every rank:
        `get_num_kv_heads` of vllm/config/model.py (0.27) and of sglang/srt/configs/model_config.py (0.5.12).
        """
        linear = self.linear.layers if self.linear else 0
        numbers = self.mla.cached if self.mla else 2 * max(1, self.kv_heads // ranks) * self.head_dim
        return (self.layers - linear - self.window_layers) * numbers

    @property
    def _attention(self) -> int:
        """Parameters of one attention layer that is not linear."""
        if self.mla:
            return self.mla.parameters(self.hidden, self.heads)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (queries * (3 if self.output_gate else 2) + 2 * keys)

    def _with_experts(self, experts: int) -> int:
        expert = 3 * self.hidden * self.moe_intermediate
        router = self.hidden * self.routed_experts
        moe = self.moe_layers * ((experts + self.shared_experts) * expert + router)
        dense = self.dense_layers * 3 * self.hidden * self.dense_intermediate
        attention = self.layers * self._attention
        if self.linear:
            attention += self.linear.layers * (self.linear.parameters(self.hidden) - self._attention)
        return self.embedding_parameters + attention + dense + moe


SHAPES = {
    "Qwen3-30B-A3B": ModelShape(
        source="Qwen/Qwen3-30B-A3B; Megatron-Bridge, Qwen3MoEModelProvider30B_A3B",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocabulary=151936,
        routed_experts=128,
        top_k=8,
        moe_intermediate=768,
    ),
    "Qwen3-235B-A22B": ModelShape(
        source="Qwen/Qwen3-235B-A22B; Megatron-Bridge, Qwen3MoEModelProvider235B_A22B",
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        vocabulary=151936,
        routed_experts=128,
        top_k=8,
        moe_intermediate=1536,
    ),
    "Qwen3-Next-80B-A3B": ModelShape(
        source="Qwen/Qwen3-Next-80B-A3B-Instruct; transformers 5.10, defaults of Qwen3NextConfig",
        layers=48,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        vocabulary=151936,
        routed_experts=512,
        top_k=10,
        shared_experts=1,
        moe_intermediate=512,
        linear=LinearAttention(layers=36, key_heads=16, value_heads=32, head_dim=128, kernel=4),
        output_gate=True,
    ),
    "GLM-4.5-Air": ModelShape(
        # Glm4MoeConfig has no default for head_dim, and hidden / heads is no integer; 128 gives the published total.
        source="zai-org/GLM-4.5-Air; transformers 5.10, defaults of Glm4MoeConfig",
        layers=46,
        dense_layers=1,
        hidden=4096,
        heads=96,
        kv_heads=8,
        head_dim=128,
        vocabulary=151552,
        routed_experts=128,
        top_k=8,
        shared_experts=1,
        moe_intermediate=1408,
        dense_intermediate=10944,
    ),
    "DeepSeek-V3": ModelShape(
        source="deepseek-ai/DeepSeek-V3; transformers 5.10, defaults of DeepseekV3Config",
        layers=61,
        dense_layers=3,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_dim=192,
        vocabulary=129280,
        routed_experts=256,
        top_k=8,
        shared_experts=1,
        moe_intermediate=2048,
        dense_intermediate=18432,
        mla=Mla(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ),
    "Ring-mini-2.0": ModelShape(
        # Ring-mini-2.0 is Ling-mini-2.0 trained further (its model card); the numbers are Ling's.
        source="inclusionAI/Ring-mini-2.0; NVIDIA's BailingMoeV2Config, which mirrors that of Ling-mini-2.0",
        layers=20,
        dense_layers=1,
        hidden=2048,
        heads=16,
        kv_heads=4,
        head_dim=128,
        vocabulary=157184,
        routed_experts=256,
        top_k=8,
        shared_experts=1,
        moe_intermediate=512,
        dense_intermediate=5120,
    ),
    "Moonlight-16B-A3B": ModelShape(
        # MoonlightModelProvider16B of Megatron-Bridge agrees except for a vocabulary of 163842.
        source="moonshotai/Moonlight-16B-A3B; slime, scripts/models/moonlight.sh",
        layers=27,
        dense_layers=1,
        hidden=2048,
        heads=16,
        kv_heads=16,
        head_dim=192,
        vocabulary=163840,
        routed_experts=64,
        top_k=6,
        shared_experts=2,
        moe_intermediate=1408,
        dense_intermediate=11264,
        mla=Mla(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ),
    "gpt-oss-20b": ModelShape(
        # GptOssConfig of transformers 5.10 agrees, except for gpt-oss-120b's 36 layers of 128 experts.
        source="openai/gpt-oss-20b; slime's model arguments for it",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocabulary=201088,
        routed_experts=32,
        top_k=4,
        moe_intermediate=2880,
        window_layers=12,
    ),
    "Qwen3-0.6B": ModelShape(
        source="Qwen/Qwen3-0.6B; Megatron-Bridge, Qwen3ModelProvider600M",
        layers=28,
        dense_layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
        dense_intermediate=3072,
        tied_embeddings=True,
    ),
}


# Types of models in transformers with one kind of layer, of which config.json says everything.
UNIFORM = ("llama", "qwen2", "qwen3", "qwen3_moe")


def read_shape(found: Mapping[str, Any]) -> ModelShape | None:
    """Returns the shape that a config.json describes; None if its type is not in UNIFORM, or numbers are missing."""
    moe = found.get("model_type") == "qwen3_moe"
    mixed = found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1 or found.get("use_sliding_window")
    if found.get("model_type") not in UNIFORM or mixed:
        return None
    try:
        layers, hidden, heads = (
            int(found[name]) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        return ModelShape(
            source="its config.json",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_dim=int(found.get("head_dim") or hidden // heads),
            vocabulary=int(found["vocab_size"]),
            dense_layers=0 if moe else layers,
            routed_experts=int(found.get("num_experts") or found["num_local_experts"]) if moe else 0,  # since 5.0
            top_k=int(found["num_experts_per_tok"]) if moe else 0,
            moe_intermediate=int(found["moe_intermediate_size"]) if moe else 0,
            dense_intermediate=0 if moe else int(found["intermediate_size"]),
            tied_embeddings=bool(found.get("tie_word_embeddings")),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def shape_of(path: str, setting: str = f"{MODEL}.path") -> ModelShape:
    """Returns the shape of a model folder or Hugging Face name, such as Qwen/Qwen3-30B-A3B-Base.

    Raises:
        ConfigError: neither config.json, if it is on this machine, nor the beginning of the path's last part says it.
    """
    if path and (shape := read_shape(json_of_model(path, "config.json"))) is not None:
        return shape
    name = path.rstrip("/").rsplit("/", 1)[-1].lower()
    for known, shape in SHAPES.items():
        if name.startswith(known.lower()):
            return shape
    raise ConfigError(
        f"{setting}={path} is not in verl_ext/launch/models.py, and its config.json is not on this machine or is not "
        f"of {', '.join(UNIFORM)}, so the sizes of the model, and of a vision tower, are not known; the file has: "
        f"{', '.join(SHAPES)}"
    )
