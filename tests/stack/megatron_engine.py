"""Runs as a rank of test_megatron_engine.py: compares verl's Megatron engine with transformers, from one checkpoint.

    python -m tests.stack.megatron_engine TASK RANK WORLD FOLDER

FOLDER has `model/` and `expected.pt`, which `expect_of_transformers` wrote.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from tensordict import TensorDict

from tests.stack.running import CPU
from tests.stack.small_models import by_name, log_probs, states
from tests.support.closeness import close
from tests.support.forking import Forked
from verl_ext.routing.engines import ENGINES
from verl_ext.routing.recorder import joined_passes

LENGTHS = (27, 20, 9, 14, 30, 11, 16, 22)
LEARNING_RATE = 1e-3
VANILLA = {"vanilla_mbridge": True}
ONE_RANK = {"mbridge": VANILLA, "Megatron-Bridge": {}}
DP2: dict = {}
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
TP2_EP2 = TP2 | EP2 | {"expert_tensor_parallel_size": 1}
CP2 = {"context_parallel_size": 2}
PP2_VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
TWO_RANKS = {
    "mbridge TP2 EP2": VANILLA | TP2_EP2,
    "mbridge PP2 VPP2": VANILLA | PP2_VPP2,
    "Megatron-Bridge DP2": DP2,
    "Megatron-Bridge EP2": EP2,
    "Megatron-Bridge TP2": TP2,
    "Megatron-Bridge TP2 EP2": TP2_EP2,
    "Megatron-Bridge PP2": PP2,
    "Megatron-Bridge PP2 VPP2": PP2_VPP2,
    "Megatron-Bridge CP2": CP2,
}


DENSE = {
    "mbridge TP2": VANILLA | TP2,
    "Megatron-Bridge TP2": TP2,
    "Megatron-Bridge PP2": PP2,
}


VALUES = {"mbridge TP2": VANILLA | TP2, "Megatron-Bridge TP2": TP2, "Megatron-Bridge PP2": PP2}


def sequences(vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocabulary, (length,), generator=generator) for length in LENGTHS]


# transformers


def expect_of_transformers(folder: Path) -> None:
    """Log-probs, gradient norm, and weights by their names before and after one step of Adam."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    rows = sequences(model.config.vocab_size)
    expected = {"weights": by_name(model), "log_probs": [log_probs(model, ids) for ids in rows]}
    expected["states"] = [states(model, ids) for ids in rows]
    tokens = sum(len(ids) - 1 for ids in rows)
    adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = [F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum") for ids in rows]
    (sum(losses) / tokens).backward()
    expected["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    adam.step()
    expected |= {"weights after": by_name(model), "log_probs after": [log_probs(model, ids) for ids in rows]}
    torch.save(expected, folder / "expected.pt")


# verl


def build(folder: Path, settings: dict, kind: str = "language_model"):
    import verl  # noqa: F401  its plugins
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    layers = {"attention_backend": "auto"}
    if not settings.get("vanilla_mbridge"):
        layers |= {"moe_permute_fusion": False, "apply_rope_fusion": False}
    engine = EngineRegistry.new(
        model_type=kind,
        backend="megatron",
        model_config=HFModelConfig(
            path=str(folder / "model"), model_type=kind, override_config={"attn_implementation": "eager"}
        ),
        engine_config=McoreEngineConfig(
            strategy="megatron", dtype="float32", override_transformer_config=layers, **settings
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=LEARNING_RATE, weight_decay=0.0, clip_grad=1.0, lr_decay_style="constant", total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(rows, **settings) -> TensorDict:
    from verl.utils import tensordict_utils as tu

    def nested(parts):
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    fields = {
        "input_ids": nested(rows),
        "position_ids": nested(torch.arange(len(ids)) for ids in rows),
        "response_mask": nested(torch.ones(len(ids) // 2, dtype=torch.long) for ids in rows),
        "loss_mask": nested(torch.ones(len(ids), dtype=torch.long) for ids in rows),
    }
    data = TensorDict(fields, batch_size=len(rows))
    tu.assign_non_tensor(
        data,
        **{
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": 64,
            "temperature": 1.0,
            "compute_loss": False,
            "calculate_entropy": True,
        }
        | settings,
    )
    return data


class Rank:
    """An engine and the sequences of this data parallel rank."""

    def __init__(self, folder: Path, engine) -> None:
        self.expected = torch.load(folder / "expected.pt")
        self.engine = engine
        rows = sequences(len(self.expected["weights"]["lm_head.weight"]))
        size = self.engine.get_data_parallel_size()
        self.mine = range(self.engine.get_data_parallel_rank(), len(rows), size)
        self.rows = [rows[index] for index in self.mine]
        self.tokens = sum(len(ids) - 1 for ids in rows) / size

    def infer(self) -> list[torch.Tensor] | None:
        """Returns log-probs of all tokens but the first of each sequence, on ranks with the last pipeline stage."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(batch(self.rows))
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return [row[:-1] for row in output["model_output"]["log_probs"].unbind()]

    def states(self) -> dict[str, torch.Tensor]:
        """Point -> rows of this rank's sequences, of the layers of its pipeline stage."""
        recorder = ENGINES["megatron"].open_recorder(self.engine)
        with self.engine.eval_mode():
            self.engine.infer_batch(batch(self.rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=1))
        return joined_passes(recorder.close(), [len(ids) for ids in self.rows])

    def step(self) -> float:
        """One step of Adam on the mean loss of all tokens; returns the gradient's norm."""

        def loss(model_output, data, dp_group=None, **_):
            values = model_output["log_probs"].values()
            counts = torch.ones_like(values)
            counts[model_output["log_probs"].offsets()[1:] - 1] = 0  # nothing follows a sequence's last token
            return -(values * counts).sum() / self.tokens, {}

        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_batch(batch(self.rows), loss)
            norm = self.engine.optimizer_step()
            self.engine.lr_scheduler_step()
        return float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().float().clone() for name, tensor in self.engine.get_per_tensor_param()[0]}


def check(rank: Rank) -> None:
    """Compares log-probs, exported weights and the gradient norm with transformers, before and after a step of Adam."""
    check_now(rank, "")
    check_states(rank)
    norm = rank.step()
    assert abs(norm / rank.expected["norm"] - 1) < 1e-5, (norm, rank.expected["norm"])
    check_now(rank, " after")


def check_states(rank: Rank) -> None:
    """Checks that the probe's hooks see, on all ranks together, the states of transformers at each of its points."""
    found = rank.states()
    expected = [rank.expected["states"][index] for index in rank.mine]
    for point, rows in found.items():
        close(rows, torch.cat([of_one[point] for of_one in expected]), name=point)
    seen = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(seen, list(found))
    assert {point for of_rank in seen for point in of_rank} == set(expected[0])


def check_now(rank: Rank, when: str) -> None:
    found = rank.weights()
    expected = rank.expected[f"weights{when}"]
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, weight in expected.items():
        # Adam's first step is by the sign of a gradient: one that rounding made goes the other way.
        apart = (found[name] - weight).abs()
        assert (apart > 2e-5).float().mean() < 1e-3 and apart.max() <= 2.1 * LEARNING_RATE, (name, apart.max())
        assert when or torch.equal(found[name], weight), name
    if (read := rank.infer()) is not None:
        for index, row in zip(rank.mine, read, strict=True):
            close(row, rank.expected[f"log_probs{when}"][index], scale=10.0)


# Tasks, each of one or two processes


def compare(folder: Path, layouts: dict[str, dict]) -> None:
    from megatron.core import parallel_state as mpu

    for name, settings in layouts.items():
        check(Rank(folder, build(folder, settings)))
        print(f"checked: {name}", flush=True)
        torch.distributed.barrier()
        mpu.destroy_model_parallel()


def value(folder: Path) -> None:
    """Compares a critic's values and its gradient norm with the same head on transformers' last hidden states."""
    from megatron.core import parallel_state as mpu
    from transformers import AutoModel

    for name, settings in VALUES.items():
        engine = build(folder, settings, "value_model")
        rows = sequences(AutoModel.from_pretrained(folder / "model").config.vocab_size)
        tokens = sum(len(ids) for ids in rows)
        with engine.eval_mode():
            read = engine.infer_batch(batch(rows))

        def loss(model_output, data, dp_group=None, tokens=tokens, **_):
            return model_output["values"].values().float().square().sum() / tokens, {}

        head = [p.detach().clone() for n, p in engine.module[-1].named_parameters() if "output_layer" in n]
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(batch(rows), loss)
            norm = float(engine.optimizer_step())
        if engine.is_mp_src_rank_with_outputs():
            base = AutoModel.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
            (weight,) = [part.requires_grad_() for part in head]
            expected = [base(ids[None]).last_hidden_state[0] @ weight.T for ids in rows]
            for found, one in zip(read["model_output"]["values"].unbind(), expected, strict=True):
                close(found.flatten(), one[:, 0], scale=10.0)
            (sum(one.square().sum() for one in expected) / tokens).backward()
            close(norm, torch.nn.utils.get_total_norm([p.grad for p in (*base.parameters(), weight)]))
        print(f"checked: {name}", flush=True)
        torch.distributed.barrier()
        mpu.destroy_model_parallel()


def save(folder: Path) -> None:
    """Makes a step, saves a checkpoint, and makes the step that a resumed run has to repeat."""
    rank = Rank(folder, build(folder, VANILLA))
    rank.step()
    rank.engine.save_checkpoint(str(folder / "checkpoint"), global_step=1)
    saved = rank.weights()
    rank.step()
    torch.save({"saved": saved, "next": rank.weights()}, folder / "next.pt")
    print("checked: save", flush=True)


def resume(folder: Path) -> None:
    """Resumes training in a process that has not trained."""
    rank = Rank(folder, build(folder, VANILLA))
    rank.engine.load_checkpoint(str(folder / "checkpoint"), del_local_after_load=False)
    expected = torch.load(folder / "next.pt")
    for when in ("saved", "next"):
        for name, weight in rank.weights().items():
            assert torch.equal(weight, expected[when][name]), (when, name)
        rank.step()
    print("checked: resume", flush=True)


TASKS = {
    "dense": lambda folder: compare(folder / "dense", DENSE),
    "one": lambda folder: compare(folder, ONE_RANK),
    "two": lambda folder: compare(folder, TWO_RANKS),
    "value": value,
    "save": save,
    "resume": resume,
}


def main(tasks: dict, task: str, rank: str, world: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{task}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(world))
    tasks[task](Path(folder))


def run_ranks(stack: Forked, module: str, task: str, world: int, folder: Path) -> list[list[str]]:
    """Runs `python -m MODULE TASK RANK WORLD FOLDER` on each rank; returns what each rank checked, after all ended
    well."""
    environment = os.environ | CPU | stack.environment | {"HF_HUB_OFFLINE": "1"}
    with ExitStack() as stopped:
        started = [
            subprocess.Popen(
                [stack.python, "-m", module, task, str(rank), str(world), str(folder)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        for one in started:
            stopped.callback(one.kill)
        outputs = [one.communicate()[0] for one in started]
    assert [one.returncode for one in started] == [0] * world, "\n".join(outputs)[-4000:]
    return [[line[9:] for line in output.splitlines() if line.startswith("checked: ")] for output in outputs]


if __name__ == "__main__":
    main(TASKS, *sys.argv[1:])
