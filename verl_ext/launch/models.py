"""Model shapes, published or read from config.json, and numbers derived from them: parameters, active parameters, bytes
of KV cache per token.

The published numbers are copies of those in each model's config.json on Hugging Face; comments name where a copy was
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
        source: the Hugging Face repository.
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

    @property
    def attention_parameters(self) -> int:
        """Parameters of all layers' attention."""
        linear = self.linear.layers * (self.linear.parameters(self.hidden) - self._attention) if self.linear else 0
        return self.layers * self._attention + linear

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
        return self.embedding_parameters + self.attention_parameters + dense + moe


def _dense_model(
    source: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, **more: Any
) -> ModelShape:
    sizes = {"head_dim": 128, "dense_layers": layers, "dense_intermediate": intermediate} | more
    return ModelShape(source, layers, hidden, heads, kv_heads, vocabulary=vocabulary, **sizes)


def _moe_model(
    source: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    experts: tuple[int, int, int],
    vocabulary: int,
    **more: Any,
) -> ModelShape:
    """Returns a mixture of experts; `experts` has their number, how many of them a token uses, and the width of one."""
    routed, top_k, width = experts
    sizes = {"head_dim": 128, "routed_experts": routed, "top_k": top_k, "moe_intermediate": width} | more
    return ModelShape(source, layers, hidden, heads, kv_heads, vocabulary=vocabulary, **sizes)


def _mostly_linear(layers: int, value_heads: int = 32) -> dict[str, Any]:
    """Returns what Qwen3-Next, 3.5 and 3.6 have in common: of four layers, three have linear attention."""
    linear = LinearAttention(layers * 3 // 4, key_heads=16, value_heads=value_heads, head_dim=128, kernel=4)
    return {"head_dim": 256, "linear": linear, "output_gate": True}


_TIED: dict[str, Any] = {"tied_embeddings": True}
# Models by the beginning of their name; the tests have the parameters on their cards.
FAMILIES = {
    # Copies in Megatron-Bridge: Qwen3MoEModelProvider30B_A3B and 235B_A22B, Qwen3ModelProvider600M.
    "Qwen3-30B-A3B": _moe_model("Qwen/Qwen3-30B-A3B", 48, 2048, 32, 4, (128, 8, 768), 151936),
    "Qwen3-235B-A22B": _moe_model("Qwen/Qwen3-235B-A22B", 94, 4096, 64, 4, (128, 8, 1536), 151936),
    # Defaults of transformers 5.10: Qwen3NextConfig, Glm4MoeConfig, DeepseekV3Config.
    "Qwen3-Next-80B-A3B": _moe_model(
        *("Qwen/Qwen3-Next-80B-A3B-Instruct", 48, 2048, 16, 2, (512, 10, 512), 151936),
        **_mostly_linear(48),
        shared_experts=1,
    ),
    # Glm4MoeConfig has no default for head_dim, and hidden / heads is no integer; 128 gives the published total.
    "GLM-4.5-Air": _moe_model(
        *("zai-org/GLM-4.5-Air", 46, 4096, 96, 8, (128, 8, 1408), 151552),
        dense_layers=1,
        dense_intermediate=10944,
        shared_experts=1,
    ),
    "GLM-4.5": _moe_model(
        *("zai-org/GLM-4.5", 92, 5120, 96, 8, (160, 8, 1536), 151552),
        dense_layers=3,
        dense_intermediate=12288,
        shared_experts=1,
    ),
    "DeepSeek-V3": _moe_model(
        *("deepseek-ai/DeepSeek-V3", 61, 7168, 128, 128, (256, 8, 2048), 129280),
        head_dim=192,
        dense_layers=3,
        dense_intermediate=18432,
        mla=Mla(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        shared_experts=1,
    ),
    # Ring-mini-2.0 is Ling-mini-2.0 trained further (its model card); the numbers are Ling's, in NVIDIA's
    # BailingMoeV2Config.
    "Ring-mini-2.0": _moe_model(
        *("inclusionAI/Ring-mini-2.0", 20, 2048, 16, 4, (256, 8, 512), 157184),
        dense_layers=1,
        dense_intermediate=5120,
        shared_experts=1,
    ),
    # slime, scripts/models/moonlight.sh; Megatron-Bridge's MoonlightModelProvider16B agrees but for a vocabulary of
    # 163842.
    "Moonlight-16B-A3B": _moe_model(
        *("moonshotai/Moonlight-16B-A3B", 27, 2048, 16, 16, (64, 6, 1408), 163840),
        head_dim=192,
        dense_layers=1,
        dense_intermediate=11264,
        shared_experts=2,
        mla=Mla(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ),
    # slime's model arguments; GptOssConfig of transformers 5.10 has gpt-oss-120b's layers and experts.
    "gpt-oss-20b": _moe_model(
        "openai/gpt-oss-20b", 24, 2880, 64, 8, (32, 4, 2880), 201088, head_dim=64, window_layers=12
    ),
    "gpt-oss-120b": _moe_model(
        "openai/gpt-oss-120b", 36, 2880, 64, 8, (128, 4, 2880), 201088, head_dim=64, window_layers=18
    ),
    "Qwen3-0.6B": _dense_model("Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, **_TIED),
    "Qwen2.5-0.5B": _dense_model("Qwen/Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, head_dim=64, **_TIED),
    "Qwen2.5-1.5B": _dense_model("Qwen/Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, **_TIED),
    "Qwen2.5-3B": _dense_model("Qwen/Qwen2.5-3B", 36, 2048, 16, 2, 11008, 151936, **_TIED),
    "Qwen2.5-7B": _dense_model("Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _dense_model("Qwen/Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _dense_model("Qwen/Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _dense_model("Qwen/Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064),
    "Qwen3-1.7B": _dense_model("Qwen/Qwen3-1.7B", 28, 2048, 16, 8, 6144, 151936, **_TIED),
    "Qwen3-4B": _dense_model("Qwen/Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, **_TIED),
    "Qwen3-8B": _dense_model("Qwen/Qwen3-8B", 36, 4096, 32, 8, 12288, 151936),
    "Qwen3-14B": _dense_model("Qwen/Qwen3-14B", 40, 5120, 40, 8, 17408, 151936),
    "Qwen3-32B": _dense_model("Qwen/Qwen3-32B", 64, 5120, 64, 8, 25600, 151936),
    "Llama-3.2-1B": _dense_model("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, head_dim=64, **_TIED),
    "Llama-3.2-3B": _dense_model("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, **_TIED),
    "Llama-3.1-8B": _dense_model("meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _dense_model("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256),
    "Gemma-2-2B": _dense_model(
        "google/gemma-2-2b", 26, 2304, 8, 4, 9216, 256000, head_dim=256, window_layers=13, **_TIED
    ),
    "Qwen3.5-9B": _dense_model("Qwen/Qwen3.5-9B", 32, 4096, 16, 4, 12288, 248320, **_mostly_linear(32)),
    "Qwen3.5-27B": _dense_model("Qwen/Qwen3.5-27B", 64, 5120, 24, 4, 17408, 248320, **_mostly_linear(64, 48)),
    "Qwen3.5-35B-A3B": _moe_model(
        *("Qwen/Qwen3.5-35B-A3B", 40, 2048, 16, 2, (256, 8, 512), 248320), **_mostly_linear(40), shared_experts=1
    ),
}
# The beginning of a name -> the model of the same shape. A vision tower, below 10 % of a model, is not counted.
ALIASES = {
    **{f"Qwen2-{size}": f"Qwen2.5-{size}" for size in ("0.5B", "1.5B", "7B", "72B")},
    **{
        f"Qwen2.5-{kind}-{size}": f"Qwen2.5-{size}"
        for kind in ("Math", "Coder", "VL")
        for size in ("1.5B", "7B", "72B")
    },
    **{f"Qwen2.5-{kind}-{size}": f"Qwen2.5-{size}" for kind in ("Coder", "VL") for size in ("3B", "32B")},
    **{
        f"Qwen3-VL-{size}": f"Qwen3-{text}"
        for size, text in (("2B", "1.7B"), ("4B", "4B"), ("8B", "8B"), ("32B", "32B"))
    },
    **{f"DeepSeek-R1-Distill-Qwen-{size}": f"Qwen2.5-{size}" for size in ("1.5B", "7B", "14B", "32B")},
    **{f"Qwen3-{kind}-30B-A3B": "Qwen3-30B-A3B" for kind in ("Coder", "VL")},
    "DeepSeek-R1-Distill-Llama-8B": "Llama-3.1-8B",
    "DeepSeek-R1": "DeepSeek-V3",
    "Meta-Llama-3": "Llama-3.1-8B",
    "Qwen3.6-27B": "Qwen3.5-27B",
    "Qwen3.6-35B-A3B": "Qwen3.5-35B-A3B",
}
# Types of models in transformers whose config.json says everything; a model of vision has its decoder in text_config.
UNIFORM = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MIXED = ("deepseek_v3", "glm4_moe", "gpt_oss", "gemma2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
OF_EXPERTS = ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
TEXT_OF = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def read_shape(found: Mapping[str, Any]) -> ModelShape | None:
    """Returns the shape that a config.json describes; None if its type is not known here, or numbers are missing."""
    if found.get("model_type") in TEXT_OF:
        text = found.get("text_config")
        kind = str(text.get("model_type", "")).removesuffix("_text") if isinstance(text, Mapping) else ""
        known = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
        return read_shape({**text, "model_type": known.get(kind, f"{kind}_text")}) if kind and text else None
    kind = str(found.get("model_type"))
    mixed = found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1 or found.get("use_sliding_window")
    if kind not in UNIFORM + MIXED or mixed:
        return None
    try:
        layers, hidden, heads = (
            int(found[name]) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        # num_local_experts since transformers 5.0, which still writes it as num_experts for some models
        counts = (found.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        experts = int(next(filter(None, counts), 0))
        if not experts and kind in OF_EXPERTS:
            return None
        dense = int(found.get("first_k_dense_replace") or 0) if experts else layers
        width = int(found.get("moe_intermediate_size") or found["intermediate_size"]) if experts else 0
        linear, mla = None, None
        if kind.startswith(("qwen3_next", "qwen3_5")):
            names = ("num_key_heads", "num_value_heads", "key_head_dim", "conv_kernel_dim")
            keys, values, size, kernel = (int(found[f"linear_{name}"]) for name in names)
            linear = LinearAttention(layers - layers // 4, keys, values, size, kernel)
        if kind == "deepseek_v3":
            lora = found.get("q_lora_rank")
            heads_of = (int(found[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            mla = Mla(lora, int(found["kv_lora_rank"]), *heads_of)
        return ModelShape(
            source="its config.json",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_dim=int(found.get("head_dim") or hidden // heads),
            vocabulary=int(found["vocab_size"]),
            dense_layers=dense,
            routed_experts=experts,
            top_k=int(found["num_experts_per_tok"]) if experts else 0,
            shared_experts=int(found.get("n_shared_experts") or bool(found.get("shared_expert_intermediate_size"))),
            moe_intermediate=width,
            dense_intermediate=int(found["intermediate_size"]) if dense else 0,
            tied_embeddings=bool(found.get("tie_word_embeddings")),
            mla=mla,
            linear=linear,
            window_layers=layers // 2 if kind in ("gemma2", "gpt_oss") else 0,
            output_gate=linear is not None,
        )
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def shape_of(path: str, setting: str = f"{MODEL}.path") -> ModelShape:
    """Returns the shape of a model folder or Hugging Face name, such as Qwen/Qwen3-30B-A3B-Base.

    Raises:
        ConfigError: neither config.json, if it is on this machine, nor the beginning of the path's last part says it.
    """
    if path and (shape := read_shape(json_of_model(path, "config.json"))) is not None:
        return shape
    name = path.rstrip("/").rsplit("/", 1)[-1].lower()
    known = max((each for each in (*FAMILIES, *ALIASES) if name.startswith(each.lower())), key=len, default=None)
    if known is not None:
        return FAMILIES[ALIASES.get(known, known)]
    raise ConfigError(
        f"{setting}={path} is not in verl_ext/launch/models.py, and its config.json is not on this machine or is not "
        f"of {', '.join(UNIFORM + MIXED + TEXT_OF)}, so the sizes of the model are not known; the file has: "
        f"{', '.join(FAMILIES)}"
    )
