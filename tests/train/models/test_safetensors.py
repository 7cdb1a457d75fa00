# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: what is written is read back; malformed files are refused."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import WeightFileError
from tessera.train.models.safetensors import SafetensorsFile, write_file

ARRAYS = {
    "a.kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(1.5, jnp.bfloat16),
    "c": np.arange(5, dtype=np.uint8),
    "empty": np.zeros((0, 4), np.float16),
}


def write(path, arrays=ARRAYS, metadata=None):
    layouts = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return write_file(path, layouts, arrays.__getitem__, metadata)


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# Two entries of one name, which the library takes for one.
TWINS = (
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    b'"a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}'
)


def test_what_is_written_is_read_back(tmp_path):
    nbytes = write(tmp_path / "a", metadata={"format": "tessera"})
    assert nbytes == (tmp_path / "a").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    file = SafetensorsFile(tmp_path / "a")
    assert file.arrays == {
        "a.kernel": ("F32", (2, 3)),
        "b": ("BF16", ()),
        "c": ("U8", (5,)),
        "empty": ("F16", (0, 4)),
    }
    for name, array in ARRAYS.items():
        got = file.view(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
    part = file.view("a.kernel")[1:, :2]
    np.testing.assert_array_equal(part, [[3.0, 4.0]])


def test_the_library_reads_metadata_and_arrays(tmp_path):
    write(tmp_path / "a", metadata={"step": "4"})
    with safetensors.safe_open(tmp_path / "a", "np") as file:
        assert file.metadata() == {"step": "4"}
    arrays = safetensors.numpy.load_file(tmp_path / "a")
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].tobytes() == array.tobytes()


DTYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]


@given(
    st.dictionaries(
        st.text('aB./"\\\0\n\x7fé\u2028😀', max_size=5),
        st.tuples(
            st.sampled_from([jnp.dtype("bfloat16"), *map(np.dtype, DTYPES)]),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
        ),
        max_size=5,
    )
)
def test_any_names_shapes_and_dtypes(tmp_path_factory, layouts):
    path = tmp_path_factory.mktemp("any") / "a"
    arrays = {
        name: np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        for name, (dtype, shape) in layouts.items()
    }
    write(path, arrays)
    file = SafetensorsFile(path)
    assert file.arrays.keys() == layouts.keys()
    for name, array in arrays.items():
        assert file.view(name).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"", b"", "EOF"),
        (b"{", b"", "EOF"),
        (b"\xff\xfe", b"", "invalid UTF-8"),
        (b"[" * 100_000, b"", "invalid type"),
        ([], b"", "invalid type"),
        ({"a": 1}, b"", "invalid type"),
        ({"a": {}}, b"", "missing field `dtype`"),
        ({"a": entry([1], 0, 4, "F5")}, bytes(4), "unknown variant `F5`"),
        ({"a": entry([1], 0, 4, ["F32"])}, bytes(4), "invalid type"),
        ({"a": entry([-1], 0, 4)}, bytes(4), "integer `-1`"),
        ({"a": entry([1.0], 0, 4)}, bytes(4), "floating point `1.0`"),
        ({"a": entry([2**63], 0, 4)}, bytes(4), "overflow"),
        ({"a": entry([2**40, 2**40], 0, 4)}, bytes(4), "overflow"),
        ({"a": entry([2], 0, 4)}, bytes(4), "invalid shape"),
        ({"a": entry([1], 4, 8)}, bytes(8), "invalid offset for tensor `a`"),
        (
            {"a": entry([1], 0, 4), "b": entry([1], 0, 4)},
            bytes(4),
            "invalid offset",
        ),
        (
            {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
            bytes(12),
            "invalid offset for tensor `b`",
        ),
        ({"a": entry([1], 0, 4)}, bytes(3), "not fully covered"),
        ({"a": entry([1], 0, 4)}, bytes(5), "not fully covered"),
        ({"a": entry([1], 0, 2**50)}, bytes(4), "invalid shape"),
        (TWINS, bytes(4), "'a'"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header, data, why):
    with pytest.raises(WeightFileError) as caught:
        SafetensorsFile(raw(tmp_path / "a", header, data))
    assert why in caught.value.got


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "header too small"),
        (b"\0" * 7, "header too small"),
        (b"\xff" * 8 + b"{}", "header too large"),
        ((100).to_bytes(8, "little"), "invalid header length"),
    ],
)
def test_a_header_larger_than_the_file_is_refused(tmp_path, content, why):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(WeightFileError) as caught:
        SafetensorsFile(tmp_path / "a")
    assert str(caught.value) == (
        f"[T805] {tmp_path}/a is not a readable safetensors file\n"
        f"  got: Error while deserializing header: {why}\n"
        "  fix: write it again, and check that it was copied completely\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T805.html"
    )


@pytest.mark.parametrize("name", ["absent", "folder"])
def test_what_is_not_a_regular_file_is_the_same_error(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(WeightFileError, match=r"No such file|not a regular file"):
        SafetensorsFile(tmp_path / name)


def test_an_existing_file_stays_until_the_new_one_is_complete(tmp_path):
    write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    layouts = {"x": (np.dtype(np.float32), (1,))}
    with pytest.raises(KeyError):
        write_file(tmp_path / "a", layouts, {}.__getitem__)
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
