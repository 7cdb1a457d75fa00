# SPDX-License-Identifier: Apache-2.0
"""GRPO with the trainer, as ``run_training.py`` runs it, in turns.

python grpo_tessera.py SETTING_AS_JSON
"""

import json
import os
import sys
from pathlib import Path
from typing import Final

import jax
from grpo_setting import SEPARATOR, TEXT, Phases, Setting, Turns

import tessera
from tessera.foundations.config_files import configs_dir
from tessera.train.config.command_line import Composed, compose
from tessera.train.loop.folder_lock import FolderLock
from tessera.train.loop.log_likelihood import log_likelihoods
from tessera.train.loop.run_environment import join
from tessera.train.loop.train import train
from tessera.train.models import from_pretrained
from tessera.train.records.phases import PhaseClock

REWARD: Final = "grpo_setting:digits"


def composed(setting: Setting, folder: str) -> Composed:
    """What a user would type."""
    length = setting.prompt_tokens + setting.completion_tokens
    words = [
        "recipe=grpo",
        f"model={setting.model}",
        f"model.mesh_shape=[{[*setting.mesh]},[fsdp,tp]]",
        "data=prompts",
        f"data.path={setting.data}",
        "data.tokenizer=bytes",
        f"rewards=[{REWARD}]",
        f"grpo.group_size={setting.group}",
        f"grpo.max_completion={setting.completion_tokens}",
        f"training.micro_batch_size={setting.rows // setting.mesh[0]}",
        f"training.sequence_length={length}",
        f"training.steps={setting.steps}",
        "training.mixed_precision=f32",
        "training.validate_every=0",
        "training.checkpoint_every=null",
        "training.report=false",
        f"optimizer.learning_rate={setting.learning_rate}",
        "optimizer.schedule=constant",
        "optimizer.weight_decay=0.0",
        f"hydra.run.dir={folder}",
    ]
    return compose(words, configs_dir())


def log_prob(folder: str) -> float:
    """Of ``TEXT`` under the model of a folder."""
    model, params = from_pretrained(folder)
    pairs = [([SEPARATOR], [*TEXT])]
    return log_likelihoods(model, params, pairs, max_length=32)[0][0]


def main(given: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    setting = Setting(**json.loads(given))
    folder = Path(setting.folder) / "tessera"
    here = str(Path(__file__).parent)
    # The processes of the rewards import the function.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    lock, clock, turns, read = FolderLock(), PhaseClock(), Turns(out), 0
    phases = Phases(turns)

    def on_phase(phase: str, number: int, begin: float) -> None:
        nonlocal read
        clock.enter(phase, number, begin)
        if phase == "rollout":
            # The steps before are computed, and their metrics read.
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            for line in map(json.loads, lines[read:]):
                turns.note(reward=line["reward"], length=line["completion_length"])
            read = len(lines)
        phases.enter(phase)

    settings = composed(setting, str(folder))
    with join(settings, lock) as processes:
        processes.watchdog.subscribe(on_phase)
        turns.answer(
            {
                "version": f"tessera {tessera.__version__}",
                "jax": jax.__version__,
                "log_prob": log_prob(setting.model),
            }
        )
        train(settings, processes, lock, clock)


if __name__ == "__main__":
    main(sys.argv[1])
