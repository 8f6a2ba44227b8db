"""Try a command of verl's `main_ppo` without a GPU: `python -m verl_cpu OPTIONS`.

It replaces the model by a generated one of 0.1 M parameters, and trains three steps of four tasks and four rollouts.
The options for this come after OPTIONS, so that those of a real run need no change.
"""

import os
import sys
from typing import NoReturn

from creditflow.engines.models.tiny import tiny_byte_model
from verl_cpu.settings import environment, mode_options, options

MODEL = tiny_byte_model()
"""Every byte is a token."""
SMALL = (
    *(f"actor_rollout_ref.model.path={MODEL}", f"critic.model.path={MODEL}"),
    *("data.train_max_samples=16", "data.val_max_samples=16", "data.train_batch_size=4"),
    *("data.max_prompt_length=2048", "data.filter_overlong_prompts=true", "data.max_response_length=16"),
    *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    *("trainer.total_training_steps=3", "trainer.total_epochs=3", "trainer.resume_mode=disable"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    *("ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=2"),
    *("+ray_kwargs.ray_init.include_dashboard=false", "+ray_kwargs.ray_init.object_store_memory=536870912"),
)


def main(given: list[str]) -> NoReturn:
    """Become verl's program, with the options `given` between its default tracker and the ones above."""
    modes = [option.partition("=")[2] for option in given if option.startswith("trainer.v1.trainer_mode=")]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "trainer.logger=[console]", *given, *SMALL, *options()]
    command += mode_options(modes[-1]) if modes else ()
    os.execve(sys.executable, command, {**os.environ, **environment()})


main(sys.argv[1:])
