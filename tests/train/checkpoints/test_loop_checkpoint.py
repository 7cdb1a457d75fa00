# SPDX-License-Identifier: Apache-2.0
"""A loop of the user's own is saved, and goes on where it was, on any mesh."""

import math
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera import dist
from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    MeshConflictError,
    SettingValueError,
    ShardDivisibilityError,
    StateLeafError,
    TesseraWarning,
)
from tessera.train import latest_step, restore_checkpoint, save_checkpoint
from tessera.train.data import EpochSampler
from tests.train.checkpoints.same_state import equal

OPTIMIZER = optax.sgd(0.05, momentum=0.9)
DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(32, 8)).astype(np.float32)
TARGETS = DRAW.normal(size=(32, 4)).astype(np.float32)


def mesh_of(fsdp, tp):
    return dist.Mesh(["fsdp", "tp"], devices=range(fsdp * tp), shape=(fsdp, tp))


@ts.function
def step(params, opt_state, key, x, y):
    key, noise = jax.random.split(key)
    x = x + 0.1 * jax.random.normal(noise, x.shape)
    loss = jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)
    updates, opt_state = OPTIMIZER.update(ts.grad(loss, params), opt_state)
    return loss, optax.apply_updates(params, updates), opt_state, key


def start(mesh=None):
    draw = np.random.default_rng(1)
    params = {
        "up": draw.normal(size=(8, 16)).astype(np.float32),
        "down": draw.normal(size=(16, 4)).astype(np.float32),
    }
    if mesh is None:
        params = jax.tree.map(jnp.asarray, params)
    else:
        specs = {"up": jax.P("fsdp", "tp"), "down": jax.P("tp", "fsdp")}
        params = {
            name: jax.device_put(value, NamedSharding(mesh.jax, specs[name]))
            for name, value in params.items()
        }
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "key": jax.random.key(3),
        "step": 0,
        "data": EpochSampler(32, 8).state_dict(),
    }


def train(state, steps):
    """The losses of so many steps, and the state after them."""
    sampler, losses = EpochSampler(32, 8), []
    sampler.load_state_dict(state["data"])
    params, opt_state, key = state["params"], state["opt_state"], state["key"]
    while len(losses) < steps:
        for rows in sampler:
            loss, params, opt_state, key = step(
                params, opt_state, key, INPUTS[rows], TARGETS[rows]
            )
            losses.append(loss.item())
            if len(losses) == steps:
                break
    after = {"params": params, "opt_state": opt_state, "key": key}
    after |= {"step": state["step"] + steps, "data": sampler.state_dict()}
    return losses, after


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Five losses on a mesh of 4 x 2, and the folder of step 3."""
    folder = tmp_path_factory.mktemp("loop")
    mesh = mesh_of(4, 2)
    whole, _ = train(start(mesh), 6)
    first, state = train(start(mesh), 3)
    assert first == whole[:3]
    assert save_checkpoint(folder, state, step=state["step"]) == folder / "3"
    return whole, folder


@pytest.mark.slow(reason="it compiles the step on three meshes")
@pytest.mark.parametrize("sizes", [(4, 2), (2, 1), None])
def test_a_loop_goes_on_on_another_mesh(saved, sizes):
    whole, folder = saved
    like = start(None if sizes is None else mesh_of(*sizes))
    state = restore_checkpoint(folder, like=like)
    assert state["step"] == latest_step(folder) == 3
    for got, target in zip(
        jax.tree.leaves(state["params"]), jax.tree.leaves(like["params"]), strict=True
    ):
        assert got.sharding == target.sharding
        assert got.committed == target.committed
    rest, _ = train(state, 3)
    if sizes == (4, 2):
        assert rest == whole[3:]  # bit for bit
    np.testing.assert_allclose(rest, whole[3:], rtol=1e-6, atol=1e-6)


def test_an_abstract_state_has_the_axes_that_it_was_saved_with(saved):
    _, folder = saved
    like = jax.eval_shape(lambda: {k: start()[k] for k in ("params", "opt_state")})
    like |= {k: start()[k] for k in ("key", "step", "data")}
    for mesh in (mesh_of(2, 1), mesh_of(2, 1).jax):
        state = restore_checkpoint(folder, like=like, mesh=mesh)
        up = state["params"]["up"].sharding
        assert up.spec == jax.P("fsdp", "tp")
        assert dict(up.mesh.shape) == {"fsdp": 2, "tp": 1}
        assert state["opt_state"][0].trace["down"].sharding.spec == jax.P("tp", "fsdp")
        assert state["key"].sharding.is_fully_replicated
    rows = dist.Mesh(["tp"], devices=range(4))
    state = restore_checkpoint(folder, like=like, mesh=rows)
    assert state["params"]["up"].sharding.spec == jax.P(None, "tp")
    with pytest.raises(ShardDivisibilityError, match="down cannot be split as it was"):
        restore_checkpoint(folder, like=like, mesh=mesh_of(3, 1))


def test_a_mesh_that_contradicts_the_state_is_refused(saved):
    _, folder = saved
    with pytest.raises(MeshConflictError, match="is on another mesh than `mesh`"):
        restore_checkpoint(folder, like=start(mesh_of(4, 2)), mesh=mesh_of(2, 1))
    restore_checkpoint(folder, like=start(mesh_of(4, 2)), mesh=mesh_of(4, 2))


def test_64_bits_are_not_rounded(tmp_path):
    state = {"f": np.array([1 / 3]), "i": np.array(2**40)}
    save_checkpoint(tmp_path, state, step=1)
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in state.items()}
    for mesh in (None, mesh_of(2, 1)):
        equal(restore_checkpoint(tmp_path, like=abstract, mesh=mesh), state)


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path):
    mesh = mesh_of(4, 2)
    state = {
        "numbers": (3, True, 2**70, 0.1, math.nan, -math.inf, "text \u00e9"),
        "none": None,
        "keys": [
            jax.random.key(1),
            RBG,
            jax.random.PRNGKey(2),
            jax.device_put(
                jax.random.split(jax.random.key(4), 8),
                NamedSharding(mesh.jax, PartitionSpec("fsdp")),
            ),
        ],
        "numpy": [
            np.array([1 / 3, 1e-300]),
            np.array(2**62),
            np.float64(1 / 3),
            np.ones((2, 2), ml_dtypes.bfloat16),
            np.array([True, False]),
        ],
        "jax": [jnp.int8(3), jnp.ones(3, jnp.bfloat16)],
        "optax": optax.chain(optax.clip(1.0), optax.adamw(0.1)).init({"w": X}),
        "generator": np.random.default_rng(5).bit_generator.state,
    }
    save_checkpoint(tmp_path, state, step=0)
    got = restore_checkpoint(tmp_path, like=state)
    equal(got, state)
    assert got["keys"][3].sharding == state["keys"][3].sharding
    np.testing.assert_array_equal(
        jax.random.bits(got["keys"][1]), jax.random.bits(state["keys"][1])
    )


X = jnp.arange(6.0).reshape(2, 3)
RBG = jax.random.key(1, impl="rbg")


def test_a_state_without_arrays_and_one_of_an_array(tmp_path):
    save_checkpoint(tmp_path / "a", {"step": 1}, step=1)
    assert restore_checkpoint(tmp_path / "a", like={"step": 0}) == {"step": 1}
    save_checkpoint(tmp_path / "b", X, step=1)
    equal(restore_checkpoint(tmp_path / "b", like=jnp.zeros((2, 3))), X)
    table = dist.tensor(
        (8, 2), dist.ShardSpec(("row",), ("tp",)), mesh_of(4, 2), init="ones"
    )
    save_checkpoint(tmp_path / "c", {"table": table}, step=1)
    got = restore_checkpoint(tmp_path / "c", like={"table": table})["table"]
    assert got.sharding.spec == jax.P("tp")
    np.testing.assert_array_equal(got, np.ones((8, 2)))


def test_objects_of_nnx_are_restored_as_new_ones(tmp_path):
    def made(seed):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        return {"model": model, "again": model, "opt": optimizer, "dropout": dropout}

    state, like = made(0), made(1)
    grads = nnx.grad(lambda model: model(X).sum())(state["model"])
    state["opt"].update(state["model"], grads)
    state["dropout"](X)
    before = np.asarray(like["model"].kernel[...])
    save_checkpoint(tmp_path, state, step=5)
    got = restore_checkpoint(tmp_path, like=like)
    equal(nnx.state(got), nnx.state(state))
    assert got["again"] is got["model"]
    np.testing.assert_array_equal(got["dropout"](X), state["dropout"](X))
    np.testing.assert_array_equal(like["model"].kernel[...], before)
    variables = restore_checkpoint(
        tmp_path, like=nnx.eval_shape(lambda: made(2)), mesh=mesh_of(2, 1)
    )
    np.testing.assert_array_equal(
        variables["model"].kernel[...], got["model"].kernel[...]
    )


def test_a_number_that_a_step_has_made_an_array_is_restored_for_a_fresh_one(tmp_path):
    """The array is as weak as it was: a strong one would widen what it multiplies."""
    fresh = {"step": 0, "rate": 0.1, "is_warm": False, "w": jnp.ones(3, jnp.bfloat16)}
    step = ts.function(lambda s: s | {k: s[k] * 1 for k in ("step", "rate")})
    state = step(fresh) | {"is_warm": jnp.asarray(True)}
    save_checkpoint(tmp_path, state, step=1)
    for like in (fresh, state):
        got = restore_checkpoint(tmp_path, like=like)
        equal(got, state)
        assert (got["w"] * got["rate"]).dtype == (state["w"] * state["rate"]).dtype
        assert [jax.typeof(x) for x in got.values()] == [
            jax.typeof(state[name]) for name in got
        ]


@pytest.mark.parametrize(
    ("array", "number"),
    [(jnp.float32(1), 0), (jnp.int32(1), 0.5), (X, 0), (X[0], False)],
)
def test_an_array_is_not_restored_for_a_number_of_another_kind(tmp_path, array, number):
    save_checkpoint(tmp_path, {"a": array}, step=1)
    with pytest.raises(CheckpointMismatchError, match="a: saved"):
        restore_checkpoint(tmp_path, like={"a": number})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"w": jnp.zeros((3, 2))}, "w: saved float32[2,3], `like` float32[3,2]"),
        ({"w": X.astype(jnp.bfloat16)}, "w: saved float32[2,3], `like` bfloat16[2,3]"),
        ({"more": X}, "more: saved has none, `like` float32[2,3]"),
        ({"step": 1.0}, "step: saved int, `like` float"),
        ({"step": jnp.int32(1)}, "step: saved int, `like` int32[]"),
        (
            {"key": jax.random.key(0, impl="rbg")},
            "key: saved key<fry>[], `like` key<rbg>",
        ),
        ({"key": jax.random.PRNGKey(0)}, "key: saved key<fry>[], `like` uint32[2]"),
        ({"w": None}, "w: saved float32[2,3], `like` has none"),
    ],
)
def test_another_tree_shape_or_dtype_is_refused(tmp_path, change, line):
    state = {"w": X, "step": 1, "key": jax.random.key(0)}
    save_checkpoint(tmp_path, state, step=1)
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_checkpoint(tmp_path, like=state | change)
    assert caught.value.got.startswith(line)


def donated():
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"f": jnp.tanh}, "f is no array of numbers, number or string: "),
        ({"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, "a is no array of numbers"),
        ({"m": np.ma.array([1.0], mask=[1])}, "m is no array of numbers"),
        ({"o": np.array([{}])}, "o is no array of numbers"),
        ({"w": jnp.zeros((0, 4))}, "w is an array without elements"),
        ({"w": donated()}, "w was donated to a step"),
        ({"a/b": 1, "a": {"b": 2}}, "two leaves of a state have one name"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path, state, text
):
    with pytest.raises(StateLeafError, match=text):
        save_checkpoint(tmp_path / "new", state, step=1)
    assert not (tmp_path / "new").exists()


def test_a_traced_state_is_refused(tmp_path):
    with pytest.raises(StateLeafError, match="w is traced"):
        jax.jit(lambda w: save_checkpoint(tmp_path, {"w": w}, step=1))(X)


def test_a_step_is_saved_once_unless_it_is_to_replace_it(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, {"step": step}, step=step)
    with pytest.raises(CheckpointWriteError, match=r"has steps \[2, 3\]"):
        save_checkpoint(tmp_path, {"step": 20}, step=2)
    assert restore_checkpoint(tmp_path, like={"step": 0}, step=2) == {"step": 2}
    with pytest.warns(TesseraWarning, match=r"was renamed to [23]\.replaced"):
        save_checkpoint(tmp_path, {"step": 20}, step=2, overwrite=True)
    assert restore_checkpoint(tmp_path, like={"step": 0}) == {"step": 20}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("1", "2", "2.replaced", "3.replaced")
    ]


def test_the_newest_are_kept(tmp_path):
    for step in range(4):
        save_checkpoint(tmp_path, {"w": X}, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, {"w": step * X}, step=step)
    file = next(path for path in (tmp_path / "2/state").rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointNotFoundError, match="not what was written"):
        restore_checkpoint(tmp_path, like={"w": X}, step=2)
    with pytest.warns(TesseraWarning, match="STEP 2 IS DAMAGED"):
        equal(restore_checkpoint(tmp_path, like={"w": X}), {"w": X})
    save_checkpoint(tmp_path, {"w": X}, step=2)


def test_a_folder_without_a_checkpoint(tmp_path):
    assert latest_step(tmp_path) is None
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointNotFoundError, match=r"steps there: \[\]"):
            restore_checkpoint(folder, like={})


@pytest.mark.parametrize(
    "options", [{"step": -1}, {"step": 1.5}, {"step": True}, {"step": 1, "keep": 0}]
)
def test_numbers_that_are_none_are_refused(tmp_path, options):
    with pytest.raises(SettingValueError, match="is a whole number from"):
        save_checkpoint(tmp_path, {"step": 1}, **options)


def test_a_bucket_is_refused(tmp_path):
    with pytest.raises(SettingValueError, match="a folder of the file system"):
        save_checkpoint("gs://bucket/run", {"step": 1}, step=1)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError) as caught:
        save_checkpoint(tmp_path / "file", {"w": X}, step=1)
    assert "hydra" not in str(caught.value)


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from tessera.train import save_checkpoint
from tessera.train.checkpoints import loop_checkpoint

save_checkpoint(sys.argv[1], {"w": jnp.ones(3)}, step=1)
loop_checkpoint.manifest.write_manifest = lambda _: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(sys.argv[1], {"w": 2 * jnp.ones(3)}, step=2)
"""


@pytest.mark.slow(reason="it starts Python")
def test_a_save_that_is_killed_leaves_the_last_complete_one(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "2/metadata.json").exists()
    assert latest_step(tmp_path) == 1
    like = {"w": jnp.zeros(3)}
    equal(restore_checkpoint(tmp_path, like=like), {"w": jnp.ones(3)})
    with pytest.warns(TesseraWarning, match=r"renamed to 2\.unfinished"):
        save_checkpoint(tmp_path, like, step=2)
    equal(restore_checkpoint(tmp_path, like=like), like)
