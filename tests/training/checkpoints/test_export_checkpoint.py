# SPDX-License-Identifier: Apache-2.0
"""The parameters of a checkpoint as a file, and a run that begins with them."""

import jax
import numpy as np
import pytest

from tessera.errors import CheckpointNotFoundError, WeightFileError
from tessera.export import main
from tessera.models.safetensors import SafetensorsFile
from tessera.models.weights import import_weights
from tessera.training.checkpoints.export_checkpoint import export_checkpoint
from tessera.training.checkpoints.saving import Checkpoints
from tessera.training.data.cursor import Cursor


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
        "  docs: docs/errors/T801.md"
    )
    assert not (tmp_path / "a").exists()


def test_a_file_to_begin_with_is_looked_at_before_anything_else(run_of, tmp_path):
    (tmp_path / "a").write_bytes(b"{}")
    with pytest.raises(WeightFileError):
        run_of(init_from=str(tmp_path / "a")).check()
