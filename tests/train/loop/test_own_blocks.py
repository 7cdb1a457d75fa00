# SPDX-License-Identifier: Apache-2.0
"""The repeated block of ``examples/own_model``: scanned, in stages, and resumed."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tessera.errors import CheckpointMismatchError
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints.checkpoint_folder import read_checkpoint
from tessera.train.checkpoints.export_checkpoint import CheckpointParams
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints, metadata_of
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir, main
from tessera.train.loop.run_summary import run_rows
from tessera.train.loop.train_state import init_state

CURSOR = Cursor(1, {"text": "a", "seed": 0})
ROOT = Path(__file__).parents[3]
SMALL = (
    "model.width=16",
    "model.layers=3",
    "training.sequence_length=16",
    "training.micro_batch_size=2",
    "data=synthetic",
    "data.synthetic.tokens=4000",
)
LAYERS = ("model=own_decoder:Decoder", *SMALL)
BLOCKS = ("model=own_blocks:BlockDecoder", *SMALL)


@pytest.fixture(autouse=True)
def in_the_folder_of_the_example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_model")


def run_of(*overrides):
    settings = compose([*overrides], configs_dir()).config
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


def losses(run, steps=3, microbatches=1):
    config = run.step_config
    state = init_state(
        run.model, config.optimizer, jax.random.key(0), run.mesh, zero_stage=0
    )
    corpus, found = run.load_data(), []
    batches = corpus.train(run.rows_per_step)
    for batch, _ in zip(batches, range(steps), strict=False):
        rows = {
            name: x.reshape(microbatches, -1, x.shape[-1]) for name, x in batch.items()
        }
        state, metrics = run.step(state, rows)
        found.append(float(metrics["loss"]))
    batches.close()
    return found


def state_of(run):
    optimizer = run.step_config.optimizer
    return init_state(run.model, optimizer, jax.random.key(0), run.mesh)


@pytest.fixture(scope="module")
def alone():
    """What one device learns of eight rows a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / "own_model")
        return losses(run_of(*BLOCKS, "training.micro_batch_size=8"))


@pytest.mark.full
def test_blocks_in_a_scan_learn_what_the_layers_do(alone):
    want = losses(run_of(*LAYERS, "training.micro_batch_size=8"))
    np.testing.assert_allclose(alone, want, rtol=1e-5)


@pytest.mark.full
def test_stages_learn_what_one_device_does(alone):
    """Three blocks on two stages, of which one has padding."""
    mesh = "model.mesh_shape=[[2,2],[pp,fsdp]]"
    options = "training.gradient_accumulation_steps=2", "training.remat=full"
    staged = run_of(*BLOCKS, mesh, *options)
    np.testing.assert_allclose(losses(staged, microbatches=2), alone, rtol=1e-5)
    rows = [row[1] for row in run_rows(staged) if row[0] == "layout"]
    assert any("stage 0: layers 0-1" in row for row in rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (["training.sync_gradients_every=2", "model.mesh_shape=[[2,2],[dp,tp]]"], 1e-5),
        (
            [
                *("training.mixed_precision=bf16", "training.pipeline_gather=step"),
                *(
                    "training.micro_batch_size=1",
                    "model.mesh_shape=[[2,2,2],[pp,ep,fsdp]]",
                ),
            ],
            1e-3,
        ),
    ],
)
def test_options_of_the_step_learn_what_one_device_does(alone, options, tolerance):
    halves = "training.gradient_accumulation_steps=2"
    # Flax's own norms promote dtypes.
    with jax.numpy_dtype_promotion("standard"):
        found = losses(run_of(*BLOCKS, halves, *options), microbatches=2)
    np.testing.assert_allclose(found, alone, rtol=tolerance)


@pytest.mark.full
def test_blocks_resume_on_a_mesh_with_stages(tmp_path, capfd):
    """The commands of the guide resume without stages what stages have begun."""
    folder = f"hydra.run.dir={tmp_path}/run"
    command = [
        *BLOCKS,
        "training.sample_length=0",
        "training.report=false",
        folder,
        "training.resume=auto",
    ]
    staged = ["model.mesh_shape=[[2,2],[pp,fsdp]]", "training.micro_batch_size=1"]
    command.append("training.gradient_accumulation_steps=2")
    assert main([*command, "training.steps=1"]) == 0
    assert main([*command, "training.steps=2", *staged]) == 0
    out = capfd.readouterr().out
    assert all(f"step {n}/{n}" in out for n in (1, 2))


@pytest.mark.full
def test_a_checkpoint_of_stages_has_the_values_of_the_blocks(tmp_path):
    alone = run_of(*BLOCKS)
    mesh = "model.mesh_shape=[[2],[pp]]"
    staged = run_of(*BLOCKS, mesh, "training.gradient_accumulation_steps=2")
    saved = state_of(staged)
    with Checkpoints(staged, tmp_path, "") as checkpoints:
        checkpoints.save(1, saved, CURSOR)
    checkpoint = read_checkpoint(tmp_path / "1")
    state = Restoration(checkpoint.metadata, alone).restore(checkpoint)
    want = named_leaves(state_of(alone).params)
    assert want["blocks/up/kernel"].shape == (3, 16, 64)
    exported = CheckpointParams(checkpoint)
    for name, array in named_leaves(state.params).items():
        np.testing.assert_allclose(array, want[name], rtol=1e-6)
        np.testing.assert_array_equal(exported.read(name.replace("/", ".")), array)


@pytest.mark.full
def test_layers_that_were_not_stacked_are_no_checkpoint_of_blocks():
    metadata = metadata_of(run_of(*LAYERS), 1, CURSOR, "")
    with pytest.raises(CheckpointMismatchError, match="blocks/0/up/kernel"):
        Restoration(metadata, run_of(*BLOCKS)).check()
