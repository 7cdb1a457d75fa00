# SPDX-License-Identifier: Apache-2.0
"""The parameters of a checkpoint as a file, and a run that begins with them."""

import json

import jax
import numpy as np
import pytest
import tensorstore

from tessera.errors import CheckpointNotFoundError, WeightFileError
from tessera.train.checkpoints.export_checkpoint import export_checkpoint
from tessera.train.checkpoints.manifest import NAME, write_manifest
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.commands.export import main
from tessera.train.config.command_line import compose
from tessera.train.data.cursor import Cursor
from tessera.train.loop.main import configs_dir
from tessera.train.models.safetensors import SafetensorsFile
from tessera.train.models.weights import import_weights

NORM = "params/final_norm/scale"


@pytest.fixture(scope="module", params=["one device", "stages"])
def written(request, run_of, filled, tmp_path_factory):
    """A job, its parameters without stages, and the folder of its checkpoint."""
    job = run_of() if request.param == "one device" else run_of(pp=2)
    folder, state = tmp_path_factory.mktemp("run"), filled(job)
    with Checkpoints(job, folder / "checkpoints", "name: small\n") as checkpoints:
        checkpoints.save(4, state, Cursor(16, {}))
    return job, job.model.plain(state.params), folder


@pytest.mark.full
def test_a_checkpoint_s_parameters_are_a_file_of_any_model_s_form(
    written, run_of, tmp_path
):
    _, params, folder = written
    path = tmp_path / "weights.safetensors"
    nbytes = export_checkpoint(folder, path)
    assert nbytes == path.stat().st_size
    got = import_weights(path, run_of().model)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.full
def test_the_command_writes_it_in_the_dtype_asked_for(written, tmp_path, capsys):
    _, _, folder = written
    path = tmp_path / "half.safetensors"
    assert main([str(folder / "checkpoints" / "4"), str(path), "--dtype=bf16"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ")
    dtypes = {dtype for dtype, _ in SafetensorsFile(path).arrays.values()}
    assert dtypes == {"BF16"}


def test_mistakes_of_the_command_are_said_in_a_line(tmp_path, capsys):
    assert main([str(tmp_path / "none"), str(tmp_path / "a")]) == 2
    assert capsys.readouterr().err.startswith("[T801] there is no complete checkpoint")


def test_a_damaged_checkpoint_is_not_exported(run_of, filled, tmp_path):
    job = run_of()
    with Checkpoints(job, tmp_path, "") as checkpoints:
        checkpoints.save(2, filled(job), Cursor(4, {}))
    (tmp_path / "2" / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError) as caught:
        export_checkpoint(tmp_path, tmp_path / "a")
    assert str(caught.value) == (
        f"[T801] the checkpoint {tmp_path}/2 is damaged\n"
        "  got: metadata.json is not what was written\n"
        "  fix: name the folder of the checkpoint before it\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T801.html"
    )
    assert not (tmp_path / "a").exists()


@pytest.fixture
def changed(run_of, filled, tmp_path):
    """Changes the metadata of a checkpoint, and the manifest with it."""
    job = run_of(pp=2)
    with Checkpoints(job, tmp_path, "") as checkpoints:
        checkpoints.save(2, filled(job), Cursor(4, {}))

    def change(edit):
        path = tmp_path / "2" / "metadata.json"
        values = json.loads(path.read_text())
        edit(values)
        path.write_text(json.dumps(values))
        (tmp_path / "2" / NAME).unlink()
        write_manifest(tmp_path / "2")

    return change


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (
            lambda values: values["arrays"][NORM].update(shape=[4, 4], layout=[[], []]),
            f"{NORM} is float32[4, 4], but float32[16] is stored",
        ),
        (
            lambda values: values["arrays"][NORM].update(dtype="int8"),
            f"{NORM} is int8[16], but float32[16] is stored",
        ),
        (
            lambda values: values["arrays"].update(
                {"params/a": values["arrays"][NORM]}
            ),
            "params/a is float32[16], but nothing is stored",
        ),
        (
            lambda values: values.update(stages=[2, [[0, 3], [2, 5]]]),
            "layers [(0, 3), (2, 5)] are not those of 2 stages",
        ),
        (
            lambda values: values.update(stages=[0, [[0, 3], [3, 5]]]),
            "layers [(0, 3), (3, 5)] are not those of 0 stages",
        ),
    ],
    ids=["shape", "dtype", "absent", "layers", "stages"],
)
def test_metadata_that_is_not_of_the_arrays_is_refused(
    changed, tmp_path, capsys, edit, line
):
    changed(edit)
    assert main([str(tmp_path), str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"[T801] the checkpoint {tmp_path}/2 is damaged\n")
    assert f"metadata.json is not usable: {line}\n" in error
    assert not (tmp_path / "a").exists()


def test_compressed_arrays_are_refused_before_they_are_read(changed, tmp_path, capsys):
    path, name = tmp_path / "2" / "state", b"params/final_norm/scale/.zarray"
    base = {"driver": "ocdbt", "base": f"file://{path}/"}
    store = tensorstore.KvStore.open(base).result()
    values = json.loads(store.read(name).result().value)
    values["compressor"] = {"id": "zlib", "level": 1}
    store.write(name, json.dumps(values).encode()).result()
    changed(lambda _: None)
    assert main([str(tmp_path), str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert f"metadata.json is not usable: {NORM} is compressed\n" in error


def test_arrays_that_cannot_be_read_are_a_coded_error(changed, tmp_path, capsys):
    # All of them, as some may be what a later one replaced.
    files = [*(tmp_path / "2" / "state").glob("ocdbt.process_*/d/*")]
    for path in files:
        path.write_bytes(b"")
    assert files
    changed(lambda _: None)
    assert main([str(tmp_path), str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("[T801] the arrays of a checkpoint cannot be read\n")
    assert not (tmp_path / "a").exists()


def test_arrays_of_another_model_than_the_configuration_s_are_refused(
    run_of, filled, tmp_path, capsys
):
    text = compose(["model=tiny"], configs_dir()).text
    job = run_of()
    with Checkpoints(job, tmp_path, text) as checkpoints:
        checkpoints.save(2, filled(job), Cursor(4, {}))
    assert main([str(tmp_path), str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("[T802] the checkpoint does not hold the parameters of")
    assert "final_norm.scale: saved float32[16], the model float32[" in error
    assert not (tmp_path / "a").exists()


def test_a_file_to_begin_with_is_looked_at_before_anything_else(run_of, tmp_path):
    (tmp_path / "a").write_bytes(b"{}")
    with pytest.raises(WeightFileError):
        run_of(init_from=str(tmp_path / "a")).check()
