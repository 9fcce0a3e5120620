"""Runs as a spawned rank of test_replica_fetch.py: verl's tqbridge on a real TransferQueue, shared and not."""

import os
from types import SimpleNamespace

import ray
import torch
import torch.distributed as dist
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

RANKS = 3
TAIL = (2, 3)
# Tokens of each trajectory; in the last batch the second has a layer more.
BATCHES = {
    "ragged": [5, 1, 8, 2, 2, 30, 1],
    "alike": [4, 4, 4, 4],
    "one long": [40, 1, 1],
    "empty rows": [0, 3, 0, 2, 0],
    "fewer than ranks": [3, 6],
    "layers that differ": [3, 5, 2],
}
ROUTING = {"routed_experts": torch.uint8, "old_routed_experts": torch.int16}


def put(name):
    """A batch in TransferQueue, one trajectory after another as agent loops write them."""
    generator = torch.Generator().manual_seed(len(name))
    for index, tokens in enumerate(BATCHES[name]):
        layers = TAIL[0] + (index == 1 and name == "layers that differ")
        shape = (1, tokens, layers, TAIL[1])
        fields = {field: torch.randint(0, 256, shape, generator=generator).to(of) for field, of in ROUTING.items()}
        fields |= {"input_ids": torch.randint(0, 99, (1, tokens), generator=generator)}
        tq.kv_batch_put(keys=[f"{name} {index}"], partition_id="train", fields=TensorDict(fields, [1]))


def meta(name, only=None, fields=("input_ids", *ROUTING)):
    keys = [f"{name} {index}" for index in (range(len(BATCHES[name])) if only is None else only)]
    extra_info = {"temperature": 0.5, "dataloader_kwargs": {"shuffle": True}}
    fields = None if fields is None else list(fields)
    return KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train", fields=fields, extra_info=extra_info)


class Rank:
    """Records what tqbridge returns, and the rows of each field that this rank fetched for it."""

    def __init__(self):
        from verl.utils.transferqueue_utils import tqbridge

        self.fetch, self.fetched, self.fails = tqbridge()(lambda data: SimpleNamespace(data=data)), {}, False
        client = tq.get_client()
        verls = client.async_get_data

        async def spy(metadata):
            if self.fails and "routed_experts" in metadata.field_names:
                raise TimeoutError("no answer\nfrom unit 7")
            for field in metadata.field_names:
                self.fetched[field] = self.fetched.get(field, 0) + metadata.size
            return await verls(metadata)

        client.async_get_data = spy

    def __call__(self, asked):
        self.fetched.clear()
        data = self.fetch(asked).data
        return data, dict(self.fetched)


def flat(data):
    """Returns all parts of a batch that could differ."""
    found = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            assert value.is_nested and value.device.type == "cpu"
            lengths = (value._maybe_min_seqlen, value._maybe_max_seqlen) if value.layout == torch.jagged else ()
            rows = [row.clone() for row in value.unbind()]
            found[name] = (value.dim(), value.layout, value.dtype, value.requires_grad, lengths, rows)
        else:
            found[name] = value.data
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return one == other


def join_cluster(rank):
    """The first rank starts Ray and a TransferQueue, and writes the batches into it."""
    cluster = [None]
    if rank == 0:
        quick = {"py_executable": os.environ["PREFORK_PYTHON"]}
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=quick)
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
        for name in BATCHES:
            put(name)
        cluster = [ray.get_runtime_context().gcs_address]
    dist.broadcast_object_list(cluster)
    if rank > 0:
        # Processes of tools/prefork.py are all of one job, of which there cannot be two drivers.
        ray._private.state.next_job_id = lambda: ray.JobID.from_int(rank)
        ray.init(address=cluster[0], log_to_driver=False, logging_level="ERROR")
        tq.init()


def rank_main(rank, store, results):
    """Fetches every batch plainly and shared; writes the differences and the fetched rows to results/RANK.pt."""
    from verl_ext.workers import replica_fetch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    join_cluster(rank)
    replica_fetch.CHUNK = 64  # bytes: several chunks
    fetch, found = Rank(), {}
    plain = {name: flat(fetch(meta(name))[0]) for name in BATCHES}
    parts = {
        "split": flat(fetch(meta("ragged", only=[1, 3, 5] if rank == 2 else [0, 2, 4, 6]))[0]),
        "without routing": flat(fetch(meta("ragged", fields=["input_ids"]))[0]),
    }

    def engine(share):
        return SimpleNamespace(engine_config=SimpleNamespace(strategy="veomni"), get_data_parallel_rank=lambda: share)

    def shared(name, asked, expected):
        data, rows = fetch(asked)
        found[name] = same(flat(data), expected), rows

    replica_fetch.share_fetches(engine(rank))
    shared("replicas of one rank", meta("ragged"), plain["ragged"])
    replica_fetch.share_fetches(engine(0))
    for name in BATCHES:
        shared(name, meta(name), plain[name])
    shared("all fields", meta("ragged", fields=None), plain["ragged"])
    shared("without routing", meta("ragged", fields=["input_ids"]), parts["without routing"])
    shared("not sent the same", meta("ragged", only=[1, 3, 5] if rank == 2 else [0, 2, 4, 6]), parts["split"])
    fetch.fails = rank == 1
    try:
        fetch(meta("ragged"))
    except Exception as error:
        found["failure"] = type(error).__name__, str(error)
    fetch.fails = False
    replica_fetch.share_fetches(engine(rank // 2))
    shared("two replicas", meta("ragged", only=[1, 3, 5] if rank == 2 else [0, 2, 4, 6]), parts["split"])
    torch.save(found, f"{results}/{rank}.pt")
    dist.barrier()  # the cluster ends with the first
    dist.destroy_process_group()
    if rank == 0:
        tq.close()
    ray.shutdown()
