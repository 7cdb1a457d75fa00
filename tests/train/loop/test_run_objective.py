# SPDX-License-Identifier: Apache-2.0
"""Which reference model a run compares with, and which data its loss can use."""

import dataclasses
import json

import pytest

from tessera.errors import BatchSizeError, SettingConflictError
from tessera.train.data.data_config import DataConfig
from tessera.train.loop.build_run import Run
from tessera.train.models.decoder.lora import LoraConfig
from tests.train.loop.post_training_runs import (
    policy_run,
    preference_run,
    write_prompts,
)
from tests.train.loop.short_runs import CONFIG

ADAPTED = {"config": dataclasses.replace(CONFIG, lora=LoraConfig(rank=2))}
MORE = ["*lora*", "*norm*"]


def test_the_reference_is_what_the_run_begins_with():
    assert preference_run("simpo").reference is None
    assert preference_run().reference == "copy"
    assert preference_run(model=ADAPTED).reference == "adapters_off"
    # Without its adapters, that model would have norms that were trained.
    assert preference_run(model=ADAPTED, trainable=MORE).reference == "copy"
    given = {"preference": {"reference": "copy"}}
    assert preference_run(model=ADAPTED, **given).reference == "copy"


@pytest.mark.parametrize("settings", [{}, {"model": ADAPTED, "trainable": MORE}])
def test_adapters_off_is_refused_where_more_is_trained(settings):
    run = preference_run(preference={"reference": "adapters_off"}, **settings)
    with pytest.raises(SettingConflictError, match="reference=copy"):
        run.check()


def test_a_policy_without_kl_needs_no_reference(tmp_path):
    path = write_prompts(tmp_path / "sums.jsonl")
    assert policy_run(path).reference is None
    assert policy_run(path, grpo={"kl_coefficient": 0.1}).reference == "copy"
    refused = {"kl_coefficient": 0.1, "reference": "adapters_off"}
    with pytest.raises(SettingConflictError, match=r"grpo\.reference=copy"):
        policy_run(path, grpo=refused).check()


def test_single_answers_are_for_kto(tmp_path):
    lines = [
        {"prompt": f"{n}+1=", "completion": str(n), "label": n % 2 == 0}
        for n in range(40)
    ]
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(name="preferences", path=str(file), validation_fraction=0.1)

    def corpus_for(loss):
        run = preference_run(loss)
        return Run(dataclasses.replace(run.config, data=data), run.mesh).load_data()

    with pytest.raises(SettingConflictError, match="40 of 40 records"):
        corpus_for("dpo")
    batch = next(corpus_for("kto").train(4, 0, 1, 0))
    assert (batch["targets"] != -100).any(axis=1).all()


def test_groups_fill_the_steps_also_where_the_mesh_takes_all_devices(tmp_path):
    path = write_prompts(tmp_path / "sums.jsonl")
    run = policy_run(path, ((-1,), ("fsdp",)), {"group_size": 3}, micro_batch_size=1)
    with pytest.raises(BatchSizeError, match="groups of 3"):
        run.check()
