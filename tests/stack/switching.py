"""A run that takes another method each step, so that all of them share one start of Ray, vLLM and the workers.

    python -m tests.stack.switching ENGINE <overrides of the run>

There is a run for each of ENGINES: fsdp2 and megatron train while vLLM generates, sglang generates while FSDP2 trains.
Each entry of SCHEDULES[ENGINE] is what a user would add to the command line. FSDP2's run has every method. Megatron's
shows that its tensors reach what acts in a worker, SGLang's that its samples reach what acts on the controller: the
methods themselves are the same code there. The step's config is composed from the run's own overrides and these, and
checked as at launch; the trainer and the workers' loss are set from it. Settings that verl reads only at the start stay
as in BASE: the reward manager, the engines, the clip range and the KL loss of the workers. The batch of every other
step is taken in blocks.
"""

import sys
from collections.abc import Iterable

from tests import ROOT
from tests.stack.running import MEGATRON_TRAINS_IN_FLOAT32, TRAINS_IN_FLOAT32
from tests.support import quick_compose
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.losses import LOSSES

BASE = (
    "stability=icepop",
    "stability.router_agreement=true",
    "stability.top_tokens.k=8",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_type=unbiased",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    # Two updates a step: in the second, the policy is no longer the one before the step.
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
)
TELLING_TOOL = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT}/tests/stack/telling_tool.py"
# What recipe=cpu_tool adds to recipe=cpu_smoke; cpu_megatron is a recipe of its own.
TWO_TURNS = (
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.format=digit",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
    TELLING_TOOL,
)
# The recipe of each engine, and what its run has besides BASE.
ENGINES = {
    "fsdp2": ("recipe=cpu_tool", f"tool_folder={ROOT}/recipes/cpu_tool", TELLING_TOOL, *TRAINS_IN_FLOAT32),
    "megatron": ("recipe=cpu_megatron", MEGATRON_TRAINS_IN_FLOAT32, *TWO_TURNS),
    "sglang": ("recipe=cpu_sglang", *TRAINS_IN_FLOAT32, *TWO_TURNS),
}
BLOCK = 128  # response tokens: a few of them in a batch
LOSS = "actor_rollout_ref.actor.policy_loss"
# So narrow that rounding alone takes some tokens past either side, and some whole responses.
NARROW = ("stability.icepop.alpha=0.999", "stability.icepop.beta=1.001")
NARROW_GEO = ("stability.geo_mask.low=0.9998", "stability.geo_mask.high=1.0002")
# The first update of a step is made by the policy that l_old is of; the second one's has moved.
GATED = ("stability=icepop", "stability.guard.mini_batch={policy_kl:2.0e-5,vllm_kl:1.0}")
COMPOSED = ("stability=icepop", "stability.correction=[icepop,geo_mask,opsm]", *NARROW_GEO, "stability.opsm.delta=0.0")
NOTHING_LEFT = ("stability=none", "stability.filters={low_probability:{threshold:1.0}}")
BYPASS = ("algorithm.rollout_correction.bypass_mode=true", "stability.router_agreement=false")
BYPASS_NARROW = ("stability=icepop", *BYPASS, *NARROW)
BYPASS_REFUSED = ("stability=icepop", *BYPASS, "stability.icepop.alpha=3", "stability.icepop.beta=4")  # by the workers
BYPASS_OPSM = ("stability=opsm", *BYPASS, "stability.opsm.delta=0.0", f"{LOSS}.loss_mode=gspo")
BYPASS_TIS = ("stability=tis", *BYPASS, "stability.tis.cap=1.0", f"{LOSS}.loss_mode=gpg")
REUSED_ROUTED = (
    *("stability=icepop", "stability.reuse_log_probs=on", *NARROW, "stability.top_tokens.k=0"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # one update a step
)
REUSED = (*REUSED_ROUTED, "stability.router_agreement=false")
ICEPOP = ("stability=icepop",)
ICEPOP_LOSS = ("stability=icepop_loss", f"{LOSS}.alpha=0.999", f"{LOSS}.beta=1.001")
GSPO = ("stability=icepop", f"{LOSS}.loss_mode=gspo")
# Each on another loss of verl, which takes weights per token in its own way.
TIS = ("stability=tis", "stability.tis.cap=1.0", f"{LOSS}.loss_mode=cispo")
TIS_SEQUENCE = ("stability=tis_sequence", "stability.tis_sequence.cap=1.0", f"{LOSS}.loss_mode=sapo")
KPOP = ("stability=kpop", "stability.kpop.phi=1e-8", f"{LOSS}.loss_mode=geo_mean")
IPO = ("stability=ipo", "stability.ipo.eps=1e-5", f"{LOSS}.loss_mode=clip_cov")
MIS = ("stability=mis", "stability.mis.cap=1.0", f"{LOSS}.loss_mode=kl_cov")
GEO_MASK = ("stability=geo_mask", *NARROW_GEO, f"{LOSS}.loss_mode=dppo_tv")
SEQ_MASK_TIS = ("stability=seq_mask_tis", *NARROW_GEO, f"{LOSS}.loss_mode=dppo_kl")
M2PO = ("stability=m2po", "stability.m2po.threshold=1e-8", f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0.1")
DPPO = ("stability=dppo_tv", "stability.router_agreement=false")
LOW_AGREEMENT = ("stability=none", "stability.filters={low_agreement:{threshold:1.0}}")
# The untrained model gives each of its 100 tokens some 0.01, half of them less: luck cannot make it drop none or all.
FILTERS = ("stability=filters", "stability.filters.low_probability.threshold=0.01")
SCHEDULES: dict[str, list[tuple[str, ...]]] = {  # the overrides of each step
    "fsdp2": [
        FILTERS,  # first, while the model is untrained
        BYPASS_NARROW,
        BYPASS_REFUSED,
        BYPASS_OPSM,
        BYPASS_TIS,
        REUSED,
        REUSED_ROUTED,
        ICEPOP,
        ("stability=icepop", *NARROW),
        ("stability=icepop", *NARROW, "stability.denominator=kept"),
        GATED,
        TIS,
        TIS_SEQUENCE,
        KPOP,
        IPO,
        M2PO,
        DPPO,
        MIS,
        GEO_MASK,
        SEQ_MASK_TIS,
        COMPOSED,
        ("stability=opsm", "stability.opsm.delta=0.0"),
        ("stability=glm5",),
        ("stability=deepseek_v32", "stability.kl_denominator=old"),
        ICEPOP_LOSS,
        ("stability=opsm_loss", f"{LOSS}.delta=0.0"),
        ("stability=llds_loss",),
        GSPO,
        ("stability=gspo",),
        ("stability=clip_cov",),
        ("stability=kl_cov",),
        ("stability=qae",),
        ("stability=grpo_positive",),
        LOW_AGREEMENT,
        NOTHING_LEFT,
    ],
    "megatron": [BYPASS_NARROW, BYPASS_REFUSED, REUSED, ICEPOP, GATED, COMPOSED, ICEPOP_LOSS, GSPO],
    "sglang": [FILTERS, ICEPOP, LOW_AGREEMENT],
}
# A method of ours that no entry names takes a step with the settings of its preset.
METHODS = (*CORRECTIONS, *ESTIMATORS, *(f"{name}_loss" for name in LOSSES))
NAMED = {entry[0] for entry in SCHEDULES["fsdp2"]}
SCHEDULES["fsdp2"] += [(f"stability={name}",) for name in METHODS if f"stability={name}" not in NAMED]


def compose(overrides: list[str]):
    """The config that a launch with these overrides trains with; later ones replace earlier ones."""
    import hydra
    from omegaconf import OmegaConf, open_dict

    from tests.support.problems import check_run
    from verl_ext.features.stability import stability_config
    from verl_ext.features.table import apply_engine_settings, read_features
    from verl_ext.launch.compose import VERL_CONFIGS, prepare

    last = {override.split("=")[0].lstrip("+"): override for override in overrides}
    with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        config = hydra.compose("ppo_trainer", prepare(list(last.values())))
    stability = stability_config(config.stability)
    check_run(read_features(config, stability))
    apply_engine_settings(read_features(config, stability))
    with open_dict(config):
        config.stability = OmegaConf.to_container(config.stability)
    return config, stability


def switching(trainer_class: type, schedule: Iterable[tuple[str, ...]], base: list[str]) -> type:
    """Returns a subclass of `trainer_class` that takes the settings of the schedule's next entry before each step."""
    from omegaconf import OmegaConf

    from verl_ext.features.table import loss_settings, read_features
    from verl_ext.trainer import batch as batches

    quick_compose.install()  # in this process, which composes a config each step
    entries, block_tokens = list(schedule), (BLOCK, batches.BLOCK_TOKENS)

    class SwitchingTrainer(trainer_class):
        def step(self, metrics, timing_raw):
            entry = entries[self.global_steps - 1]
            config, stability = compose([*base, *entry])
            self.config.algorithm = config.algorithm
            for name in ("ppo_mini_batch_size", "calculate_entropy"):  # of the update
                self.config.actor_rollout_ref.actor[name] = config.actor_rollout_ref.actor[name]
            self.stability_run.features = features = read_features(config, stability)
            batches.BLOCK_TOKENS = block_tokens[self.global_steps % 2]
            policy_loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss)
            policy_loss.pop("_target_", None)
            policy_loss.pop("rollout_correction", None)
            settings = loss_settings(features) | {"policy_loss": policy_loss}
            active = self.actor_rollout_wg.configure_loss(settings)[0]
            print(f"switching: step {self.global_steps}: {' '.join(entry)}: {active}", flush=True)
            return super().step(metrics, timing_raw)

        def _update_actor(self, batch, metrics):
            sent = self.stability_run.update_batch(batch, first=True)
            print(f"switching: there is {' '.join(batch.fields)}; sent is {' '.join(sent.fields)}", flush=True)
            print(
                f"switching: step {self.global_steps} is measured in {len(batches.parts_of(batch))} block(s)",
                flush=True,
            )
            return super()._update_actor(batch, metrics)

    return SwitchingTrainer


if __name__ == "__main__":
    from tests.stack import own_trainer

    schedule, base = SCHEDULES[sys.argv.pop(1)], sys.argv[1:]
    own_trainer.main(lambda trainer_class: switching(trainer_class, schedule, base))
