# SPDX-License-Identifier: Apache-2.0
"""``model=<folder>``: the configuration and the first weights of a published model."""

import json

import jax
import numpy as np
import pytest

from tessera.errors import ModelFolderError, SettingConflictError, WeightFileError
from tessera.train.commands.export import main as export
from tessera.train.config.command_line import compose
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir, main
from tessera.train.models import from_pretrained
from tessera.train.models.families.published_files import Published
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

# tp does not divide the vocabulary: a step pads it, and the export has no padding.
VALUES = {**GEMMA3, "vocab_size": 265, "max_position_embeddings": 32768}
SMALL = (
    *("training.sequence_length=16", "training.micro_batch_size=4"),
    *(
        "data=synthetic",
        "data.synthetic.tokens=4000",
        "training.sample_length=0",
        "training.report=false",
    ),
)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "tiny-gemma", gemma3_tensors(VALUES), VALUES)


def composed(folder, *overrides):
    return compose([f"model={folder}", *SMALL, *overrides], configs_dir())


def run_of(folder, *overrides):
    config = composed(folder, *overrides).config
    return Run(config, mesh_of_shape(config.model.mesh_shape))


def test_the_folder_is_the_configuration_and_the_weights(folder):
    both = composed(folder, "model.mesh_shape=[[2,2],[fsdp,tp]]")
    model = both.config.model
    assert model.config == from_pretrained(folder)[0].config
    assert model.name == "tiny-gemma"
    assert model.mesh_shape == ((2, 2), ("fsdp", "tp"))
    assert both.config.training.init_from == str(folder)
    # A checkpoint keeps the configuration: the folder may be gone when it is read.
    assert settings_of_text(both.text) == both.config


@pytest.mark.slow(reason="it composes six configurations")
def test_weights_may_be_made_anew_or_read_from_elsewhere(folder, tmp_path):
    def init_from(*overrides):
        return composed(folder, *overrides).config.training.init_from

    assert init_from("training.init_from=null") is None
    assert init_from("training.init_from=other.safetensors") == "other.safetensors"
    assert init_from("training.resume=auto") == str(folder)
    assert init_from(f"training.resume={tmp_path}") is None
    with pytest.raises(SettingConflictError):
        init_from(f"training.resume={tmp_path}", f"training.init_from={folder}")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelFolderError, match=r"config\.json cannot be read"):
        composed(tmp_path)
    values = {**GEMMA3, "attn_logit_softcapping": 30.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelFolderError, match="attn_logit_softcapping = 30"):
        composed(tmp_path)


def test_what_a_tool_wrote_about_itself_is_a_note(folder):
    assert len(composed(folder).notes) == 1  # the recipe
    values = {**VALUES, "unsloth_version": "2024.9", "unsloth_fixed": True}
    write_folder(folder, gemma3_tensors(VALUES), values)
    both = composed(folder)
    assert both.config.model.config == from_pretrained(folder)[0].config
    assert both.notes[:-1] == tuple(
        f"{folder / 'config.json'}: {key} is about a tool, and ignored"
        for key in ("unsloth_version", "unsloth_fixed")
    )


@pytest.mark.slow(reason="it composes six configurations")
def test_a_rate_that_would_undo_the_weights_is_a_warning(folder):
    rate = "optimizer.learning_rate=0.003"
    assert run_of(folder).warnings() == []
    (line,) = run_of(folder, rate).warnings()
    assert "for adamw, optimizer.learning_rate is usually 5e-06 to 5e-05" in line
    others = (
        *(("model.lora.rank=2",), ("training.trainable=['*norm*']",)),
        *(("training.init_from=null",), ("optimizer=sgd",)),
    )
    for other in others:
        assert run_of(folder, "optimizer.learning_rate=0.002", *other).warnings() == []


def test_a_sequence_that_is_longer_than_the_folder_allows_is_a_warning(folder):
    given = composed(folder, "training.sequence_length=40000")
    run = Run(given.config, mesh_of_shape(given.config.model.mesh_shape))
    (line,) = run.warnings(Published.parse(given.published))
    assert line.startswith("training.sequence_length=40000 is more than the 32,768 ")


def test_another_configuration_than_that_of_the_weights_is_refused(folder):
    """Equal shapes: without the check, the model would compute other numbers."""
    with pytest.raises(ModelFolderError, match="window = 9, not 8"):
        run_of(folder, "model.window=9").check()
    run_of(folder, "model.scan_unroll=2").check()  # changes no number
    run_of(folder, "model.window=9", "training.init_from=null").check()


def test_weights_that_do_not_fit_are_found_before_anything_is_compiled(folder):
    tensors = gemma3_tensors(VALUES)
    del tensors["model.norm.weight"]
    write_folder(folder, tensors, VALUES)
    with pytest.raises(WeightFileError, match=r"model\.norm\.weight: the folder has n"):
        run_of(folder).check()


@pytest.mark.full
def test_a_folder_is_trained_resumed_and_exported_by_commands(folder, tmp_path):
    run = f"hydra.run.dir={tmp_path / 'run'}"
    mesh = "model.mesh_shape=[[2,2],[fsdp,tp]]"
    rate = "optimizer.learning_rate=1e-12"  # f32 parameters do not change
    words = [f"model={folder}", *SMALL, run, mesh, rate, "optimizer.warmup_steps=0"]
    assert main([*words, "training.steps=1"]) == 0
    assert main([*words, "training.steps=2", "training.resume=auto"]) == 0
    out = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert export([*out, "--format=hf", "--dtype=f32"]) == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["max_position_embeddings"] == VALUES["max_position_embeddings"]
    before, after = from_pretrained(folder), from_pretrained(tmp_path / "out")
    assert after[0].config == before[0].config
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after[1], before[1]
    )
