# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: a coded error within 10 s and 500 MB, or the saved values.

Half of them have a manifest that agrees with the damage, as whoever gives others a
checkpoint can write one.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore

from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints import manifest
from tessera.train.checkpoints.choose_checkpoint import choose
from tessera.train.checkpoints.export_checkpoint import export_checkpoint
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import configs_dir
from tessera.train.loop.trained_model import open_trained
from tessera.train.models.safetensors import SafetensorsFile
from tests.fuzz.damage import ODD, Draw, bounded, damaged_bytes, damaged_json
from tests.train.checkpoints.test_export_folder import SMALL

STEP = Path("checkpoints/4")


class Saved:
    """A run, the folder of its checkpoint, and what that holds."""

    def __init__(self, folder: Path) -> None:
        composed = compose(SMALL, configs_dir())
        self.text, self.folder = composed.text, folder
        self.run = Run(composed.config, mesh_of_shape(composed.config.model.mesh_shape))
        draw = np.random.default_rng(0)

        def leaf(struct: jax.ShapeDtypeStruct) -> jax.Array:
            values = draw.integers(1, 99, struct.shape).astype(struct.dtype)
            return jax.device_put(values, struct.sharding)

        state = jax.tree.map(leaf, self.run.abstract_state)
        with Checkpoints(self.run, folder / STEP.parent, self.text) as checkpoints:
            checkpoints.save(4, state, Cursor(16, {}))
        self.state = named_leaves(state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("run"))


def damaged_config(draw: Draw, content: bytes) -> bytes:
    """``metadata.json`` with damage to the text of the configuration in it."""
    values = json.loads(content)
    text = values["config"].encode()
    if draw.random() < 0.5:
        text = damaged_bytes(draw, text)
    else:
        lines = text.split(b"\n")
        number = draw.randrange(len(lines))
        odd = json.dumps(draw.choice(ODD)).encode()
        lines[number] = lines[number].partition(b":")[0] + b": " + odd
        text = b"\n".join(lines)
    return json.dumps(values | {"config": text.decode(errors="replace")}).encode()


def other_arrays(draw: Draw, content: bytes) -> bytes:
    """``metadata.json`` with arrays of other shapes, dtypes, axes and names."""
    values = json.loads(content)
    arrays = values["arrays"]
    for name in draw.sample([*arrays], draw.randint(1, 3)):
        kind = draw.randrange(5)
        if kind == 0:
            arrays[f"{name}/a"] = arrays.pop(name)
        elif kind == 1:
            shape = [[2**40], [0], [], [1] * 200, [2**31, 2**31], [4]]
            arrays[name]["shape"] = draw.choice(shape)
        elif kind == 2:
            dtypes = ["int8", "bfloat16", "object", "O", "<f8", "S9", "key<fry>", "f4,"]
            arrays[name]["dtype"] = draw.choice(dtypes)
        elif kind == 3:
            arrays[name]["layout"] = draw.choice([[], [["a"]], [["tp"]] * 9, [[]] * 2])
        else:
            arrays[name] = arrays[draw.choice([*arrays])]
    values["mesh"] = draw.choice(
        [values["mesh"], {}, {"fsdp": 0}, {"a b": 2}, {"dp": 2**40}, {"pp": 3}]
    )
    stages = [None, [2, [[0, 1], [1, 2]]], [1, [[0, 2**40]]], [2**40, [[0, 2]]]]
    values["stages"] = draw.choice(stages)
    return json.dumps(values).encode()


def damage_stored_arrays(draw: Draw, state: Path) -> None:
    """Damage what TensorStore says of an array, and the chunks of one."""
    base = {"driver": "ocdbt", "base": f"file://{state}/"}
    store = tensorstore.KvStore.open(base).result()
    for key in draw.sample(store.list().result(), 2):
        content = store.read(key).result().value
        if not key.endswith(b".zarray"):
            store.write(key, damaged_bytes(draw, content)).result()
            continue
        values = json.loads(content)
        other = {
            "chunks": [[2**40], [2**31] * len(values["shape"]), [0], []],
            "shape": [[2**40], [2**20] * len(values["shape"]), []],
            "dtype": ["<i4", "<f8", "|b1", "bfloat16"],
            "compressor": [{"id": "zlib", "level": 1}, {"id": "blosc"}],
            "fill_value": [1, "NaN", "a"],
        }
        for name in draw.sample([*other], 2):
            values[name] = draw.choice(other[name])
        content = json.dumps(values).encode()
        store.write(key, content).result()


def damage_checkpoint(draw: Draw, folder: Path) -> str:
    """Damage a checkpoint; what was damaged."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if draw.random() < 0.5:
        names = {"json": damaged_json, "config": damaged_config, "arrays": other_arrays}
        kind = draw.choice([*names])
        path = folder / manifest.LAST
        path.write_bytes(names[kind](draw, path.read_bytes()))
        return "metadata"
    kind = draw.choice(["bytes", "cut", "json", "absent", "swapped", "link", "arrays"])
    path, other = draw.sample(files, 2)
    if kind == "bytes":
        path.write_bytes(damaged_bytes(draw, path.read_bytes()))
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif kind == "json":
        path = folder / "state" / draw.choice(["_METADATA", "_sharding"])
        path.write_bytes(damaged_json(draw, path.read_bytes()))
    elif kind == "absent":
        path.unlink()
    elif kind == "swapped":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    elif kind == "link":
        path.unlink()
        path.symlink_to(draw.choice([Path("/dev/zero"), Path("/etc/hostname"), other]))
    else:
        damage_stored_arrays(draw, folder / "state")
    return "files"


def check(
    arrays: Mapping[str, Any], expected: Mapping[str, Any], *, are_saved: bool
) -> None:
    """Arrays that were read are those of the run, and hold what was saved."""
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        one, two = np.asarray(array), np.asarray(expected[name])
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert not are_saved or (one == two).all()


def params_of(saved: Saved) -> dict[str, Any]:
    begin = "params/"
    return {
        name.removeprefix(begin): array
        for name, array in saved.state.items()
        if name.startswith(begin)
    }


@pytest.mark.slow(reason="each way reads a checkpoint by Orbax")
@pytest.mark.fuzz(sample=10, whole=2000)
def test_a_damaged_checkpoint(seed, saved, tmp_path):
    draw, folder = Draw(seed), shutil.copytree(saved.folder, tmp_path / "run")
    kind = damage_checkpoint(draw, folder / STEP)
    if draw.random() < 0.8 and (folder / STEP / manifest.NAME).exists():
        (folder / STEP / manifest.NAME).unlink()
        try:
            manifest.write_manifest(folder / STEP)
        except OSError:
            return
    are_saved, params = kind == "metadata", params_of(saved)
    with bounded():
        choice = choose(str(folder), tmp_path / "other")
        choice.check(saved.run, saved.run.load_data(), saved.text)
        state = Restoration(choice.checkpoint.metadata, saved.run).restore(
            choice.checkpoint
        )
        check(named_leaves(state), saved.state, are_saved=are_saved)
    with bounded():
        export_checkpoint(folder, tmp_path / "weights")
        file = SafetensorsFile(tmp_path / "weights")
        arrays = {name.replace(".", "/"): file.view(name) for name in file.arrays}
        check(arrays, params, are_saved=are_saved)
    with bounded():
        export_checkpoint(folder, tmp_path / "hf", kind="hf")
    with bounded():
        arrays = named_leaves(open_trained(folder).read(None))
        check(arrays, params, are_saved=are_saved)
