# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: as others read it, and nothing that is malformed."""

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
from tessera.models.safetensors import DTYPES, open_file, write_file

ARRAYS = {
    "a.kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(1.5, jnp.bfloat16),
    "c": np.arange(5, dtype=np.uint8),
    "empty": np.zeros((0, 4), np.float16),
}


def write(path, arrays=ARRAYS, metadata=None):
    forms = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return write_file(path, forms, arrays.__getitem__, metadata)


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_is_written_is_read_back(tmp_path):
    nbytes = write(tmp_path / "a", metadata={"format": "tessera"})
    assert nbytes == (tmp_path / "a").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    file = open_file(tmp_path / "a")
    assert file.entries.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        got = file.read(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
    part = file.read("a.kernel", (slice(1, 2), slice(0, 2)))
    np.testing.assert_array_equal(part, [[3.0, 4.0]])


def test_the_reference_library_reads_it_and_writes_what_is_read(tmp_path):
    write(tmp_path / "ours", metadata={"step": "4"})
    with safetensors.safe_open(tmp_path / "ours", "np") as file:
        assert file.metadata() == {"step": "4"}
    theirs = safetensors.numpy.load_file(tmp_path / "ours")
    assert theirs.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert theirs[name].tobytes() == array.tobytes()
    safetensors.numpy.save_file(theirs, tmp_path / "theirs")
    file = open_file(tmp_path / "theirs")
    for name, array in ARRAYS.items():
        assert file.read(name).tobytes() == array.tobytes()
        assert file.entries[name].dtype == array.dtype


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([*DTYPES.values()]),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
        ),
        max_size=5,
    )
)
def test_any_names_shapes_and_dtypes(tmp_path_factory, forms):
    path = tmp_path_factory.mktemp("any") / "a"
    arrays = {
        name: np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        for name, (dtype, shape) in forms.items()
    }
    write(path, arrays)
    file = open_file(path)
    assert file.entries.keys() == forms.keys()
    for name, array in arrays.items():
        assert file.read(name).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"", b"", "Expecting value"),
        (b"{", b"", "Expecting property name"),
        (b"\xff\xfe", b"", "decode"),
        (b"[" * 100_000, b"", "recursion"),
        ([], b"", "the header is no object"),
        ({"a": 1}, b"", "not subscriptable"),
        ({"a": {}}, b"", "'dtype'"),
        ({"a": entry([1], 0, 4, "F8")}, bytes(4), "'a' is of dtype 'F8'"),
        ({"a": entry([1], 0, 4, ["F32"])}, bytes(4), "unhashable"),
        ({"a": entry([-1], 0, 4)}, bytes(4), "'a' says -1 where a size belongs"),
        ({"a": entry([1.0], 0, 4)}, bytes(4), "'a' says 1.0 where"),
        ({"a": entry([2**63], 0, 4)}, bytes(4), "where a size belongs"),
        ({"a": entry([2**40, 2**40], 0, 4)}, bytes(4), "its shape takes"),
        ({"a": entry([2], 0, 4)}, bytes(4), "offsets 0 to 4, and its shape takes 8"),
        ({"a": entry([1], 4, 8)}, bytes(8), "'a' begins at 4, and the bytes before"),
        (
            {"a": entry([1], 0, 4), "b": entry([1], 0, 4)},
            bytes(4),
            "'b' begins at 0, and the bytes before it end at 4",
        ),
        (
            {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
            bytes(12),
            "'b' begins at 8, and the bytes before it end at 4",
        ),
        ({"a": entry([1], 0, 4)}, bytes(3), "the arrays take 4 bytes of 3"),
        ({"a": entry([1], 0, 4)}, bytes(5), "the arrays take 4 bytes of 5"),
        ({"a": entry([1], 0, 2**50)}, bytes(4), "offsets 0 to 1125899906842624"),
        (b'{"a": {}, "a": {}}', b"", "'a' is there twice"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, header, data, why):
    with pytest.raises(WeightFileError) as caught:
        open_file(raw(tmp_path / "a", header, data))
    assert why in caught.value.got


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, b"\xff" * 8 + b"{}", (100).to_bytes(8, "little")]
)
def test_a_header_that_is_larger_than_the_file_is_not_read(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(WeightFileError) as caught:
        open_file(tmp_path / "a")
    size = int.from_bytes(content[:8], "little")
    assert str(caught.value) == (
        f"[T805] {tmp_path}/a is no safetensors file that can be read\n"
        f"  got: a header of {size:,} bytes in a file of {len(content):,}\n"
        "  fix: write it again, and see that it was copied to its end\n"
        "  docs: docs/errors/T805.md"
    )


def test_a_file_that_is_not_there_is_the_same_error(tmp_path):
    with pytest.raises(WeightFileError, match="No such file"):
        open_file(tmp_path / "a")


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(tmp_path):
    write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    forms = {"x": (np.dtype(np.float32), (1,))}
    with pytest.raises(KeyError):
        write_file(tmp_path / "a", forms, {}.__getitem__)
    assert (tmp_path / "a").read_bytes() == before
