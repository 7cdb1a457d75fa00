# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself: read back as it was, or refused."""

import json

import pytest

from tessera.errors import CheckpointMismatchError
from tessera.train.checkpoints.metadata import (
    SCHEMA,
    Metadata,
    Stored,
    read_metadata,
    write_metadata,
)
from tessera.train.data.cursor import Cursor

METADATA = Metadata(
    step=4,
    arrays={
        "step": Stored((), "int32", ()),
        "params/decoder/up": Stored((2, 3, 8), "bfloat16", ((), ("dp", "fsdp"), ())),
    },
    mesh={"dp": 2, "fsdp": 1},
    processes=2,
    stages=(2, ((0, 3), (3, 5))),
    cursor=Cursor(96, {"text": "abc", "seed": -(2**70)}),
    random={"seed": -(2**70), "kind": "threefry2x32"},
    config="name: tiny\n",
    versions={"tessera": "0.1.0"},
)


@pytest.mark.parametrize("stages", [METADATA.stages, None])
def test_metadata_is_read_as_it_was_written(tmp_path, stages):
    metadata = Metadata(**{**vars(METADATA), "stages": stages})
    write_metadata(tmp_path / "metadata.json", metadata)
    assert read_metadata(tmp_path / "metadata.json") == metadata


def test_it_is_text_for_people(tmp_path):
    path = tmp_path / "metadata.json"
    write_metadata(path, METADATA)
    read = json.loads(path.read_text())
    assert read["schema"] == SCHEMA
    assert read["cursor"] == {"rows": 96, "order": {"text": "abc", "seed": -(2**70)}}
    assert path.read_text().startswith('{\n "arrays": {\n')


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.pop("step"),
        lambda read: read.update(step="4"),
        lambda read: read.update(step=-1),
        lambda read: read.update(step=True),
        lambda read: read.update(arrays=[1, 2]),
        lambda read: read["arrays"].update(step={"shape": [1.5], "dtype": "f32"}),
        lambda read: read.update(stages=[2]),
        lambda read: read.update(stages=[2, [[1, 2, 3]]]),
        lambda read: read.update(cursor=None),
        lambda read: read.update(mesh="dp"),
        lambda read: read.update(config=None),
        lambda read: read.update(is_validated="yes"),
        lambda read: read.update(versions={"tessera": 1}),
        lambda read: read.update(random={"seed": [0]}),
        lambda read: read["arrays"]["step"].update(layout="dp"),
        lambda read: read["arrays"]["step"].update(dtype=32),
        lambda read: read["arrays"]["step"].update(dtype="object"),
        lambda read: read["arrays"]["step"].update(dtype="f4,"),
        lambda read: read["arrays"]["step"].update(layout=[["dp"]]),
        lambda read: read["arrays"]["step"].update(shape=[4], layout=[["tp"]]),
        lambda read: read.update(mesh={}),
    ],
)
def test_what_tessera_did_not_write_is_refused(tmp_path, change):
    path = tmp_path / "metadata.json"
    write_metadata(path, METADATA)
    read = json.loads(path.read_text())
    change(read)
    path.write_text(json.dumps(read))
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        read_metadata(path)


def test_a_newer_form_is_an_error_of_its_own(tmp_path):
    path = tmp_path / "9" / "metadata.json"
    path.parent.mkdir()
    write_metadata(path, METADATA)
    read = json.loads(path.read_text())
    path.write_text(json.dumps({**read, "schema": SCHEMA + 1, "arrays": "other"}))
    with pytest.raises(CheckpointMismatchError) as caught:
        read_metadata(path)
    assert str(caught.value) == (
        f"[T802] a newer Tessera wrote the checkpoint {path.parent}\n"
        f"  got: schema {SCHEMA + 1}, and this Tessera reads up to {SCHEMA}\n"
        "  fix: install Tessera 0.1.0 or newer\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T802.html"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"schema": 1, "step": ' + "[" * 200_000,
        '{"schema": 1, "step": Infinity}',
        '{"schema": 1e999}',
        '{"schema": ' + "9" * 5000 + "}",
        '{"schema": 1, "schema": 2}',
        '{"schema": 2, "versions": "[2J"}',
    ],
)
def test_what_is_hardly_json_is_refused_like_the_rest(tmp_path, text):
    path = tmp_path / "metadata.json"
    path.write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        read_metadata(path)


def test_a_step_that_is_not_its_folder_s_is_refused(tmp_path):
    """As of a checkpoint that was renamed, or put in the place of another."""
    for name in ("4", "best", "4.damaged"):
        (tmp_path / name).mkdir()
        write_metadata(tmp_path / name / "metadata.json", METADATA)
        assert read_metadata(tmp_path / name / "metadata.json").step == 4
    (tmp_path / "5").mkdir()
    write_metadata(tmp_path / "5" / "metadata.json", METADATA)
    with pytest.raises(ValueError, match="step 4, in the folder of step 5"):
        read_metadata(tmp_path / "5" / "metadata.json")
