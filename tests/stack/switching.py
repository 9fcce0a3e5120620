"""A run that takes another method each step, so that all of them share one start of Ray, vLLM and the workers.

    python -m tests.stack.switching <overrides of the run>

Each entry of SCHEDULE is what a user would add to the command line. The step's config is composed from the run's own
overrides and these, and checked as at launch; the trainer and the workers' loss are set from it. What verl reads once,
at the start, stays as BASE has it: the reward manager, the engines, the clip range and the KL loss of the workers.
The batch of every other step is taken in blocks.
"""

import sys

from tests import ROOT

BASE = (
    "stability=icepop",
    "stability.router_agreement=true",
    "stability.head.k=8",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT}/tests/stack/hanging_tool.py",
    "stability.guard.slow_step_s=5",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_type=unbiased",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    # Two updates a step: in the second, the policy is no longer the one before the step.
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
)
BLOCK = 128  # response tokens: a few of them in a batch
LOSS = "actor_rollout_ref.actor.policy_loss"
NOTHING_LEFT = ("stability=none", "stability.filters={low_probability:{threshold:1.0}}")
BYPASS = ("algorithm.rollout_correction.bypass_mode=true", "stability.router_agreement=false")
BYPASSED = [
    ("stability=icepop", *BYPASS, "stability.icepop.alpha=0.999", "stability.icepop.beta=1.001"),
    ("stability=icepop", *BYPASS, "stability.icepop.alpha=3", "stability.icepop.beta=4"),  # refused by the workers
    ("stability=opsm", *BYPASS, "stability.opsm.delta=0.0", f"{LOSS}.loss_mode=gspo"),
    ("stability=tis", *BYPASS, "stability.tis.cap=1.0", f"{LOSS}.loss_mode=gpg"),
]
SCHEDULE: list[tuple[str, ...]] = [
    *BYPASSED,
    ("stability=icepop",),
    ("stability=icepop", "stability.icepop.alpha=0.999", "stability.icepop.beta=1.001"),
    ("stability=icepop", "stability.icepop.alpha=0.999", "stability.icepop.beta=1.001", "stability.denominator=kept"),
    ("stability=tis", "stability.tis.cap=1.0"),
    ("stability=tis_sequence", "stability.tis_sequence.cap=1.0"),
    ("stability=kpop", "stability.kpop.phi=1e-7"),
    ("stability=mis", "stability.mis.cap=1.0"),
    ("stability=geo_mask",),
    ("stability=seq_mask_tis",),
    ("stability=icepop", "stability.correction=[icepop,geo_mask,opsm]", "stability.opsm.delta=0.0"),
    ("stability=opsm", "stability.opsm.delta=0.0"),
    ("stability=glm5",),
    ("stability=deepseek_v32",),
    ("stability=icepop_loss", f"{LOSS}.alpha=0.999", f"{LOSS}.beta=1.001"),
    ("stability=icepop_loss", f"{LOSS}.alpha=3", f"{LOSS}.beta=4"),  # drops every token
    ("stability=opsm_loss", f"{LOSS}.delta=0.0"),
    ("stability=llds_loss",),
    ("stability=router_shift_loss",),
    ("stability=router_shift_loss", f"{LOSS}.base=geo_mean"),
    *(
        ("stability=icepop", f"{LOSS}.loss_mode={mode}")
        for mode in ("gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
    ),
    ("stability=qae",),
    ("stability=grpo_positive",),
    ("stability=filters", "stability.filters.low_probability.threshold=0.005"),
    ("stability=none", "stability.filters={low_agreement:{threshold:1.0}}"),
    ("stability=none", "stability.filters=[overlong,zero_variance]", "algorithm.adv_estimator=grpo"),
    NOTHING_LEFT,
]


def compose(overrides: list[str]):
    """The config that a launch with these overrides trains with; later ones stand for earlier ones."""
    import hydra
    from omegaconf import OmegaConf, open_dict

    from verl_ext.launch.checks import apply_engine_settings, check_run
    from verl_ext.launch.compose import VERL_CONFIGS, prepare
    from verl_ext.settings.stability import stability_config

    last = {override.split("=")[0].lstrip("+"): override for override in overrides}
    with hydra.initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        config = hydra.compose("ppo_trainer", prepare(list(last.values())))
    stability = stability_config(config.stability)
    check_run(config, stability)
    apply_engine_settings(config, stability)
    with open_dict(config):
        config.stability = OmegaConf.to_container(config.stability)
    return config, stability


def switching(trainer_class: type, base: list[str]) -> type:
    """`trainer_class`, taking the settings of SCHEDULE's next entry before each step."""
    from omegaconf import OmegaConf

    from verl_ext.core.segments import AT_ONCE
    from verl_ext.launch.checks import loss_settings
    from verl_ext.trainer import in_blocks

    class SwitchingTrainer(trainer_class):
        def step(self, metrics, timing_raw):
            entry = SCHEDULE[self.global_steps - 1]
            config, stability = compose([*base, *entry])
            self.config.algorithm = config.algorithm
            self.stability_run.use(config, stability)
            in_blocks.AT_ONCE = BLOCK if self.global_steps % 2 else AT_ONCE
            policy_loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss)
            policy_loss.pop("_target_", None)
            policy_loss.pop("rollout_correction", None)
            settings = loss_settings(config, stability) | {"policy_loss": policy_loss}
            active = self.actor_rollout_wg.configure_loss(settings)[0]
            print(f"switching: step {self.global_steps}: {' '.join(entry)}: {active}", flush=True)
            return super().step(metrics, timing_raw)

        def _update_actor(self, batch, metrics):
            sent = self.stability_run.for_update(batch)
            print(f"switching: there is {' '.join(batch.fields)}; sent is {' '.join(sent.fields)}", flush=True)
            return super()._update_actor(batch, metrics)

    return SwitchingTrainer


if __name__ == "__main__":
    from tests.stack import own_trainer

    base = sys.argv[1:]
    own_trainer.main(lambda trainer_class: switching(trainer_class, base))
