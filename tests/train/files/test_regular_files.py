# SPDX-License-Identifier: Apache-2.0
"""What may be opened, and what would not end."""

import errno
import os

import pytest

from tessera.train.files.regular_files import (
    check_regular,
    is_kernel_file,
    read_regular,
)


def refusal(path):
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the text is looked at
        check_regular(path)
    return caught.value.strerror


def test_a_file_and_a_link_to_one_are_regular(tmp_path):
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").symlink_to("a")
    check_regular(tmp_path / "a")
    check_regular(str(tmp_path / "b"))


def test_pipes_devices_and_folders_are_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/null", tmp_path):
        assert refusal(path) == "it is not a regular file"


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="no /proc")
def test_what_the_kernel_makes_up_is_not_even_by_a_link(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self/environ")
    for path in ("/proc/self/environ", tmp_path / "link"):
        assert refusal(path) == "the kernel generates it when it is read"
    assert is_kernel_file("/proc")
    # The way through /proc leads out of it.
    assert not is_kernel_file(f"/proc/self/root{tmp_path}")


def test_what_is_not_there_says_so(tmp_path):
    assert refusal(tmp_path / "nothing") == os.strerror(errno.ENOENT)


def test_a_file_that_is_longer_than_it_may_be_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    assert read_regular(tmp_path / "a", 4) == b"text"
    with pytest.raises(OSError, match="it has more than 3 bytes"):
        read_regular(tmp_path / "a", 3)
