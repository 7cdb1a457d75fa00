# SPDX-License-Identifier: Apache-2.0
"""Numbers that are written come back as the same numbers."""

import json
import math
import os
import resource

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from tessera.errors import OutputPathError
from tessera.train.loop import metrics
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import RunFolder, open_run_folder


@pytest.fixture
def folder(tmp_path):
    return open_run_folder(tmp_path / "run", "")


def lines(folder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def scalars(folder):
    """The (tag, step, value) of TensorBoard's file, read by the format's definition."""
    (path,) = folder.tensorboard.iterdir()
    data, found = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
        data = data[16 + length :]
    return found


def test_a_line_has_the_step_first_and_then_the_numbers_in_order(folder):
    with MetricWriter(folder) as writer:
        writer.write(10, {"loss": 2.5, "tokens_per_second": 100, "ok": True})
        writer.write(20, {"val_loss": 1.5})
    assert folder.metrics.read_text() == (
        '{"step": 10, "loss": 2.5, "tokens_per_second": 100, "ok": true}\n'
        '{"step": 20, "val_loss": 1.5}\n'
    )


def test_a_line_is_in_the_file_as_soon_as_it_is_written(folder):
    with MetricWriter(folder) as writer:
        writer.write(1, {"loss": 2.5})
        assert lines(folder) == [{"step": 1, "loss": 2.5}]


def test_arrays_of_every_dtype_keep_their_exact_value(folder):
    values = {
        "f32": jnp.float32(1) / 3,
        "bf16": jnp.bfloat16(0.1),
        "f16": np.float16(0.1),
        "i32": jnp.int32(2**31 - 1),
        "np": np.float64(0.1),
        "bool": jnp.array(True),
    }
    with MetricWriter(folder) as writer:
        writer.write(0, values)
    (line,) = lines(folder)
    assert np.float32(line["f32"]) == np.float32(1) / np.float32(3)
    assert line["bf16"] == float(jnp.bfloat16(0.1)) != 0.1
    assert line["f16"] == float(np.float16(0.1))
    assert line["i32"] == 2**31 - 1
    assert line["np"] == 0.1
    assert line["bool"] == 1


@hypothesis.given(st.floats(allow_nan=False))
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    max_examples=100,
)
def test_every_float_reads_back_as_itself(tmp_path, number):
    folder = open_run_folder(tmp_path, "")
    with MetricWriter(folder) as writer:
        writer.write(0, {"x": number})
    assert float(lines(folder)[0]["x"]) == number


def test_what_is_not_finite_stays_json_and_reads_back(folder):
    with MetricWriter(folder) as writer:
        writer.write(0, {"a": math.nan, "b": math.inf, "c": jnp.float32(-math.inf)})
    text = folder.metrics.read_text()

    def refuse(word):
        raise AssertionError(word)

    (line,) = [json.loads(text, parse_constant=refuse)]
    assert line == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert math.isnan(float(line["a"]))
    assert [float(line["b"]), float(line["c"])] == [math.inf, -math.inf]


def test_tensorboard_gets_the_finite_numbers(folder):
    with MetricWriter(folder) as writer:
        writer.write(5, {"loss": 2.5, "grad_norm": math.nan})
        writer.write(10, {"val_loss": 1.25})
    assert scalars(folder) == [("loss", 5, 2.5), ("val_loss", 10, 1.25)]


def test_other_processes_write_nothing(tmp_path):
    with MetricWriter(None) as writer:
        writer.write(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_no_mistake(folder):
    writer = MetricWriter(folder)
    writer.close()
    writer.close()
    assert folder.metrics.read_text() == ""


def test_a_folder_that_is_gone_is_said(folder):
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(OutputPathError) as caught:
        MetricWriter(folder)
    assert caught.value.got == f"{folder.metrics}: Is a directory"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_disk_that_fills_up_is_said(folder):
    folder.metrics.unlink()
    folder.metrics.symlink_to("/dev/full")
    with pytest.raises(OutputPathError) as caught, MetricWriter(folder) as writer:
        writer.write(1, {"loss": 1.0})
    assert caught.value.got == f"{folder.metrics}: No space left on device"


def test_a_run_goes_on_without_tensorboard(folder, monkeypatch, caplog):
    """Each write of a file that cannot grow fails; that is said once."""
    monkeypatch.setattr(metrics, "_TENSORBOARD_FLUSH_SECONDS", 0.0)
    with MetricWriter(folder) as writer:
        writer.write(1, {"loss": 1.0})
        size = (folder.tensorboard / os.listdir(folder.tensorboard)[0]).stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            # The other file stays below that.
            for step in (2, 3):
                writer.write(step, {"x": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [line["step"] for line in lines(folder)] == [1, 2, 3]
    assert scalars(folder) == [("loss", 1, 1.0)]
    (record,) = caplog.records
    assert record.message == (
        "TensorBoard gets no more numbers: [Errno 27] File too large"
    )


def test_a_folder_that_is_not_where_it_was_gets_no_more_numbers(folder):
    def refuse():
        raise OutputPathError("it is not where it was")

    with MetricWriter(folder) as writer:
        writer.write(1, {"loss": 2.5})
    moved = RunFolder(folder.path, refuse)
    with (
        pytest.raises(OutputPathError, match="not where it was"),
        MetricWriter(moved) as writer,
    ):
        writer.write(2, {"loss": 2.5})
    assert lines(folder) == [{"step": 1, "loss": 2.5}]
