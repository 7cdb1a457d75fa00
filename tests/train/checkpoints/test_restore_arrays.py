# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on another mesh: bit for bit, and every difference by name."""

import dataclasses
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import CheckpointMismatchError
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints.checkpoint_folder import Checkpoint, read_checkpoint
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.optimizer_config import AdafactorConfig, SgdConfig
from tessera.train.data.cursor import Cursor

CURSOR = Cursor(12, {"text": "a", "seed": 0})

MESHES: dict[str, dict[str, Any]] = {
    "one device": {},
    "fsdp 4": {"fsdp": 4},
    "tp 2": {"tp": 2},
    "pp 2, of 3 and 2 layers": {"pp": 2},
    "dp 2 fsdp 2 tp 2": {"dp": 2, "fsdp": 2, "tp": 2},
    "interleaved": {
        "pp": 2,
        "pipeline_schedule": "interleaved",
        "pipeline_chunks": 2,
    },
    "dualpipev": {
        "pp": 2,
        "pipeline_schedule": "dualpipev",
        "pipeline_chunks": 2,
    },
    "dp 2 pp 2, zero 1": {"dp": 2, "pp": 2, "zero_stage": 1},
    "dp 4, zero 3": {"dp": 4, "zero_stage": 3},
    "offloaded": {"dp": 2, "zero_stage": 1, "offload_optimizer": True},
}


def save(job, state, root) -> Checkpoint:
    with Checkpoints(job, root, "name: small\n") as checkpoints:
        checkpoints.save(2, state, CURSOR)
    checkpoint = read_checkpoint(root / "2")
    assert isinstance(checkpoint, Checkpoint), checkpoint
    return checkpoint


def restore(checkpoint, job):
    restoration = Restoration(checkpoint.metadata, job)
    restoration.check()
    return restoration.restore(checkpoint)


def plain(job, state) -> dict[str, np.ndarray]:
    """Every array without stages, in the form that all meshes share."""
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    split = job.model.split
    if split is None:
        return arrays
    return {
        name: np.asarray(split.unstack(jnp.asarray(array)))
        if "/decoder/" in name
        else array
        for name, array in arrays.items()
    }


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.slow(reason="the one test of resuming on other meshes")
@pytest.mark.parametrize(
    "names",
    [
        ("dualpipev", "dp 2 fsdp 2 tp 2"),
        pytest.param(tuple(MESHES), marks=pytest.mark.full),
    ],
    ids=["some meshes", "all meshes"],
)
def test_a_state_goes_from_mesh_to_mesh_bit_for_bit(run_of, filled, tmp_path, names):
    first = run_of()
    job, state = first, filled(first)
    expected = plain(job, state)
    for number, name in enumerate([*names, "one device"]):
        checkpoint = save(job, state, tmp_path / str(number))
        job = run_of(**MESHES[name])
        state = restore(checkpoint, job)
        assert_same(plain(job, state), expected)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        wanted = jax.tree.map(lambda leaf: leaf.sharding, job.abstract_state)
        assert places == wanted, name


def test_layers_that_fill_up_a_stage_are_zeros_again(run_of, filled, tmp_path):
    plain_job, staged = run_of(), run_of(pp=2)
    state = restore(save(plain_job, filled(plain_job), tmp_path), staged)
    split = staged.model.split
    absent = split.numbers >= split.num_layers
    assert absent.sum() == 1
    for name, leaf in named_leaves(state).items():
        if "/decoder/" in name:
            assert not np.asarray(leaf)[absent].any(), name


@pytest.mark.full
def test_factored_moments_are_regrouped_too(run_of, filled, tmp_path):
    config = dataclasses.replace(run_of().config.model.config, d_model=128)
    config = dataclasses.replace(config, mlp_dim=128)
    jobs = [
        run_of(config=config, optimizer=AdafactorConfig(), **mesh)
        for mesh in ({}, {"pp": 2}, {})
    ]
    assert any(
        "/v_row/decoder/" in name for name in named_leaves(jobs[0].abstract_state)
    )
    state = filled(jobs[0])
    expected = plain(jobs[0], state)
    for number, (before, after) in enumerate(pairwise(jobs)):
        state = restore(save(before, state, tmp_path / str(number)), after)
    assert_same(plain(jobs[2], state), expected)


# --- optional parts


def test_optional_parts_begin_fresh_or_are_given_up_and_it_is_said(
    run_of, filled, tmp_path
):
    plain_job = run_of(dp=2)
    scaled = run_of(dp=2, mixed_precision="fp16")
    checkpoint = save(plain_job, filled(plain_job), tmp_path / "a")
    state = restore(checkpoint, scaled)
    assert jax.tree.leaves(state.loss_scale) == jax.tree.leaves(scaled.loss_scale)
    assert jax.tree.leaves(state.loss_scale)
    assert Restoration(checkpoint.metadata, scaled).notes() == [
        "the checkpoint has no loss_scale, which training.mixed_precision needs: it is "
        "initialized",
    ]
    back = save(scaled, state, tmp_path / "b")
    assert restore(back, plain_job).loss_scale is None
    assert Restoration(back.metadata, plain_job).notes() == [
        "training.mixed_precision does not use the checkpoint's loss_scale: it is "
        "dropped",
    ]


# --- what does not fit


def test_every_difference_of_shape_is_listed(run_of, filled, tmp_path):
    job = run_of()
    checkpoint = save(job, filled(job), tmp_path)
    wider = run_of(config=dataclasses.replace(job.config.model.config, mlp_dim=64))
    with pytest.raises(CheckpointMismatchError) as caught:
        restore(checkpoint, wider)
    said = str(caught.value)
    assert "the checkpoint of step 2 does not hold what this run needs" in said
    for kind, names in (
        ("float32[5,16,32], this run float32[5,16,64]", ("gate", "up")),
        ("float32[5,32,16], this run float32[5,64,16]", ("down",)),
    ):
        for name in names:
            # The parameter and both moments.
            line = f"decoder/mlp/{name}/kernel: saved {kind}"
            assert said.count(line) == 3, said


def test_another_dtype_is_an_error_and_no_cast(run_of, filled, tmp_path):
    job = run_of()
    metadata = save(job, filled(job), tmp_path).metadata
    name = "params/final_norm/scale"
    assert name in metadata.arrays
    halved = dataclasses.replace(metadata.arrays[name], dtype="bfloat16")
    metadata = dataclasses.replace(metadata, arrays={**metadata.arrays, name: halved})
    assert Restoration(metadata, job).differences() == [
        f"{name}: saved bfloat16[16], this run float32[16]"
    ]


def test_another_optimizer_lists_what_is_missing_and_what_is_left(
    run_of, filled, tmp_path
):
    job, other = run_of(), run_of(optimizer=SgdConfig())
    metadata = save(job, filled(job), tmp_path).metadata
    lines = Restoration(metadata, other).differences()
    moments = len(jax.tree.leaves(job.abstract_state.optimizer))
    assert len(lines) >= moments - 2
    assert all(line.startswith("optimizer/") for line in lines)
    assert any(line.endswith("this run has none") for line in lines)


def test_stages_are_no_difference(run_of, filled, tmp_path):
    job = run_of()
    metadata = save(job, filled(job), tmp_path).metadata
    assert Restoration(metadata, run_of(pp=2)).differences() == []


def test_an_array_with_another_rank_is_a_difference(run_of, filled, tmp_path):
    job = run_of()
    metadata = save(job, filled(job), tmp_path).metadata
    name = "params/decoder/mlp/up/kernel"
    flat = dataclasses.replace(metadata.arrays[name], shape=(4,), layout=(("fsdp",),))
    metadata = dataclasses.replace(metadata, arrays={**metadata.arrays, name: flat})
    restoration = Restoration(metadata, run_of(pp=2, tp=2))
    assert restoration.differences() == [
        f"{name}: saved float32[4], this run float32[5,16,32]"
    ]
    assert name not in restoration.arrays
