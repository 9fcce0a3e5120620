"""The modules of Transformer Engine that a Megatron decoder is built of, in plain torch.

Classes and parameters have the names of Transformer Engine, by which mbridge and Megatron-Bridge recognise each weight.
A checkpoint of a CPU run therefore has the form of a GPU run's. The module can be imported only with megatron-core.

Shape legend: n tokens of all packed sequences, sorted by expert in the grouped layers; E experts of this rank.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, _initialize_affine_weight_gpu
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide, get_pg_rank, get_pg_size
from torch import Tensor, nn


def norm_weight(config: Any, size: int) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    # With it, Megatron sums the gradient over the ranks of tensor parallelism, which see different tokens.
    weight.sequence_parallel = config.sequence_parallel
    return weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


class TENorm(nn.Module):
    """RMSNorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise NotImplementedError(f"normalization={config.normalization} has no stand-in on CPU cores")
        self.eps, self.weight = eps, norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """An RMSNorm and the linear layer after it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = norm_weight(config, input_size)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class TELinear(nn.Module):
    """A linear layer that each rank of tensor parallelism has whole: the down projections of latent attention."""

    parallel_mode = "duplicated"  # shows Megatron-Bridge that nothing is split

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: Any,
        init_method: Any,
        bias: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if parallel_mode != self.parallel_mode or bias:
            raise NotImplementedError(f"parallel_mode={parallel_mode}, bias={bias} has no stand-in on CPU cores")
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # see `norm_weight`

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class GroupedLinear(nn.Module):
    """A weight `weight0`, `weight1`, ... for each expert of this rank."""

    axis: int  # the axis of a weight that expert tensor parallelism splits

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        is_expert: bool,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if bias or not is_expert:
            raise NotImplementedError("grouped layers on CPU cores are experts without a bias")
        self.config, self.num_gemms, self.groups = config, num_gemms, pg_collection
        sizes = [output_size, input_size]
        sizes[self.axis] = divide(sizes[self.axis], get_pg_size(pg_collection.expt_tp))
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(*sizes, dtype=config.params_dtype))
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=self.axis, is_expert=True)
            # megatron-core's own line: with TP > 1, ETP 1 and EP 1 it leaves the gradients of experts unreduced.
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{index}", weight)

    def weights(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"weight{index}") for index in range(self.num_gemms)]

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        """Applies each expert to its tokens; in x, [n, input size], the first m_splits[0] are the first expert's."""
        parts = zip(x.split(list(m_splits)), self.weights(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def backward_dw(self) -> None:
        """Does nothing: the weights' gradients are computed together with the inputs' here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the place of each expert's weight in a checkpoint, as TEGroupedLinear does, but without fp8 state."""
        metadata = metadata or {}
        first, experts = self.num_gemms * get_pg_rank(self.groups.ep), self.num_gemms * get_pg_size(self.groups.ep)
        apart = metadata.get("singleton_local_shards", False)  # a key of its own for each expert
        found = {}
        for index, weight in enumerate(self.weights()):
            number = first + index
            offsets = sharded_offsets if apart else (*sharded_offsets, (len(sharded_offsets), number, experts))
            name = f"{index}.weight"
            sharded = make_sharded_tensors_for_checkpoint(
                {name: weight},
                "",
                {name: self.axis},
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sharded, f"{index}.", f"{number}.{prefix}" if apart else prefix)
            found[f"{prefix}weight{index}"] = shard = sharded[name]
            shard.replica_id = (*shard.replica_id[:2], get_pg_rank(self.groups.expt_dp))
        return found


class TEColumnParallelGroupedLinear(GroupedLinear):
    axis = 0


class TERowParallelGroupedLinear(GroupedLinear):
    axis = 1


class TEDotProductAttention(DotProductAttention):
    """Causal attention within each of the packed sequences ("thd"); values may have another width than keys.

    With context parallelism, each rank has the queries of some tokens (`places_of`), and gathers all keys and values.
    """

    def __init__(
        self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # megatron-core's own attention refuses another
        super().__init__(alone, *args, **kwargs)
        self.config = config
        # megatron-core's own attention has one width for both, and whole sequences.
        self.packed_only = k_channels != v_channels or config.context_parallel_size > 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns [n, heads * value's width] for query and key [n, heads, width] and value [n, heads, its width]."""
        if packed_seq_params is None:
            if self.packed_only:
                raise NotImplementedError(
                    "latent attention and context parallelism over unpacked sequences have no stand-in on CPU cores"
                )
            return super().forward(query, key, value, attention_mask, **kwargs)
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
        grouped = query.shape[1] != key.shape[1]
        group = mpu.get_context_parallel_group()
        ranks, rank = group.size(), group.rank()
        keys = gather_from_sequence_parallel_region(key, group=group).chunk(ranks)
        values = gather_from_sequence_parallel_region(value, group=group).chunk(ranks)
        parts = []
        for start, end in pairwise(ends):
            mine = slice(start // ranks, end // ranks)
            places = [places_of(each, ranks, end - start) for each in range(ranks)]
            out = F.scaled_dot_product_attention(
                query[mine].movedim(0, 1),
                torch.cat([part[mine] for part in keys]).movedim(0, 1),
                torch.cat([part[mine] for part in values]).movedim(0, 1),
                attn_mask=places[rank][:, None] >= torch.cat(places) if ranks > 1 else None,
                is_causal=ranks == 1,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )
            parts.append(out.movedim(1, 0).flatten(1))
        return torch.cat(parts)


def places_of(rank: int, ranks: int, length: int) -> Tensor:
    """Returns the places in a sequence of the tokens that a rank of context parallelism has: of 2 x ranks equal pieces,
    one counted from the beginning and one from the end ("zigzag" of `preprocess_thd_engine`, verl 0.9.1)."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[-1 - rank]])


class TESpecProvider(LocalSpecProvider):
    """The modules that megatron-core builds a decoder of."""

    def linear(self) -> type:
        return TELinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TENorm

    def core_attention(self) -> type:
        return TEDotProductAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        if not moe_use_grouped_gemm:
            raise NotImplementedError("experts that are not grouped have no stand-in on CPU cores")
        layers = {"linear_fc1": TEColumnParallelGroupedLinear, "linear_fc2": TERowParallelGroupedLinear}
        return TEGroupedMLP, MLPSubmodules(**layers)
