# SPDX-License-Identifier: Apache-2.0
"""Lines that a rank may get from anybody: each is read as what it is, or turned away.

What a line is comes from how it was made: a rank's own, written in any way that JSON
has, or with one change that makes it none. Whatever it is, nothing but a coded error
leaves the reader, and no message commands the terminal.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tessera.errors import TesseraError
from tessera.train.checkpoints.metadata import read_metadata
from tessera.train.files.untrusted_json import parse_json
from tessera.train.runtime import rendezvous
from tessera.train.runtime.cluster import Cluster
from tessera.train.runtime.launcher import free_port
from tessera.train.runtime.rank_consistency import difference_error, differences
from tessera.train.runtime.rendezvous import Handshake

HOST = "127.0.0.1"
FINGERPRINT = {"versions": {"jax": "0.10.2"}, "configuration": {"training.seed": "0"}}
# What a terminal obeys, what changes the direction of text, and what is no character.
ODD = ["\x1b[2J", "\x1b]0;x\x07", "\u202e", "\x00", "\x9b31m", "\ud800", "\r", "\n"]
PLAIN = ["a", "training.seed", " ", '"', "\\", "é"]
DEEP = "[" * 200_000

Draw = random.Random
Said = dict[str, Any]


def text_of(draw: Draw) -> str:
    return "".join(draw.choices([*ODD, *PLAIN], k=draw.randint(0, 6)))


def fingerprint_of(draw: Draw) -> dict[str, dict[str, str]]:
    return {
        text_of(draw): {text_of(draw): text_of(draw) for _ in range(draw.randint(0, 4))}
        for _ in range(draw.randint(0, 4))
    }


def handshake_of(draw: Draw) -> Said:
    count = draw.choice([1, 2, 3, 64, 2**20])
    return {
        "tessera": 3,
        "rank": draw.randrange(count),
        "world_size": count,
        "topic": text_of(draw),
        "process": text_of(draw),
        "fingerprint": fingerprint_of(draw),
    }


def written(said: Said) -> bytes:
    return json.dumps(said).encode()


def legal_line(draw: Draw, said: Said) -> bytes:
    """A line of these values, written in any way that JSON has."""
    items = [*said.items()]
    draw.shuffle(items)
    if draw.random() < 0.3:
        items.append(("more", draw.choice([None, 1.5, [[]], {"rank": -1}, "x"])))
    spaces = draw.choice([(",", ":"), (", ", ": "), (" ,\t", "  :  ")])
    text = json.dumps(dict(items), separators=spaces)
    plain = json.dumps(dict(items), separators=spaces, ensure_ascii=False)
    if "\ud800" not in plain and draw.random() < 0.3:
        text = plain
    return text.encode() + draw.choice([b"\n", b"", b"  \n"])


# What a field cannot be, as it is written.
NUMBERS = ["-1", "1.5", "1.0", "1e2", "1e999", '"1"', "true", "null", "[]", "{}"]
NUMBERS += ["NaN", "Infinity", "-Infinity", "9" * 5000, str(2**60), DEEP]
TEXTS = ["1", "null", "true", "[]", "{}", '["x"]', '"\x01"', "'x'", "NaN", DEEP]
OBJECTS = ['"x"', "1", "null", "[]", "[[1]]", DEEP, '{"a": 1}', '{"a": "x"}']
OBJECTS += ['{"a": []}', '{"a": {"b": 1}}', '{"a": {"b": null}}', '{"a": {"b": []}}']
CANNOT_BE = {
    "tessera": [*NUMBERS, "0", "2"],
    "rank": [*NUMBERS, str(2**20)],
    "world_size": [*NUMBERS, "0", str(2**20 + 1)],
    "topic": TEXTS,
    "process": TEXTS,
    "fingerprint": OBJECTS,
}


def with_field(said: Said, name: str, text: str) -> bytes:
    """A line in which the value of one field is written so."""
    marker = "the place of the value"
    line = json.dumps({**said, name: marker})
    return line.replace(json.dumps(marker), text).encode()


def damaged(draw: Draw, said: Said) -> bytes:
    """What is left of a line, or stands in its place: nothing that JSON has."""
    line, name = written(said), draw.choice([*said])
    twice = json.dumps({name: said[name]}).encode()[1:]
    changes: list[Callable[[], bytes]] = [
        lambda: line[: draw.randrange(len(line))],
        lambda: line[:-1] + b", " + twice,
        lambda: line + line,
        lambda: b"\xff" + line,
        lambda: json.dumps(said).encode("utf-16"),
        lambda: b"[" * draw.choice([10, 1000, 200_000]),
        lambda: b'{"a":' * draw.choice([10, 1000, 100_000]),
        lambda: draw.randbytes(draw.randint(0, 99)) + b"\xff",
        lambda: b"GET / HTTP/1.1\r\n\r\n",
    ]
    return draw.choice(changes)() + draw.choice([b"\n", b""])


def illegal_line(draw: Draw, said: Said) -> bytes:
    """A line that is none of a rank, by one change."""
    name = draw.choice([*said])
    rest = {key: value for key, value in said.items() if key != name}
    changes: list[Callable[[], bytes]] = [
        lambda: with_field(said, name, draw.choice(CANNOT_BE[name])),
        lambda: written(said | {"rank": said["world_size"]}),
        lambda: written(rest),
        lambda: b"[" + written(said) + b"]",
        lambda: damaged(draw, said),
    ]
    return draw.choice(changes)()


def assert_quiet(text: str) -> None:
    """See that a message commands no terminal, and can be written anywhere."""
    assert text.replace("\n", "").isprintable(), ascii(text)
    text.encode()


@pytest.mark.fuzz(sample=100, whole=6000)
def test_a_line_of_a_rank_is_read_as_it_was_meant(seed):
    draw = Draw(seed)
    said = handshake_of(draw)
    line = legal_line(draw, said)
    read = Handshake.read(line)
    assert read is not None, line
    assert (read.rank, read.world_size) == (said["rank"], said["world_size"])
    assert read.fingerprint == said["fingerprint"]
    assert_quiet(read.process)
    others = differences({0: FINGERPRINT, 1: read.fingerprint})
    if others:
        assert_quiet(str(difference_error(others)))


@pytest.mark.fuzz(sample=100, whole=6000)
def test_a_line_that_is_none_is_turned_away(seed):
    draw = Draw(seed)
    line = illegal_line(draw, handshake_of(draw))
    assert Handshake.read(line) is None, line[:300]


def answer_of(draw: Draw) -> Said:
    texts = {name: text_of(draw) for name in ("shared", "what", "got", "fix")}
    code = draw.choice(["T705", "T706", "T707", "T710", "T504"])
    return {"agreed": draw.random() < 0.5, "code": code, **texts}


def outcome(line: bytes) -> tuple[str, str]:
    """What is shared, or the code of an error and its message."""
    try:
        return "", rendezvous._read_answer(line, (HOST, 1))
    except TesseraError as error:
        assert_quiet(str(error))
        return error.code, str(error)


@pytest.mark.fuzz(sample=100, whole=4000)
def test_an_answer_is_what_rank_0_shares_or_its_error(seed):
    draw = Draw(seed)
    said = answer_of(draw)
    code, text = outcome(legal_line(draw, said))
    assert code == ("" if said["agreed"] else said["code"])
    assert text == said["shared"] or code


@pytest.mark.fuzz(sample=100, whole=4000)
def test_an_answer_that_is_none_is_a_stranger_s(seed):
    draw = Draw(seed)
    said = answer_of(draw)
    needed = "shared" if said["agreed"] else draw.choice(["code", "what", "got", "fix"])
    name = draw.choice(["agreed", needed])
    rest = {key: value for key, value in said.items() if key != name}
    changes: list[Callable[[], bytes]] = [
        lambda: with_field(said, name, draw.choice(["1", "null", "[]", "{}", DEEP])),
        lambda: written(rest),
        lambda: damaged(draw, said),
    ]
    code, _ = outcome(draw.choice(changes)())
    # One that does not say that all agree is never taken for one that does.
    assert code == "T705" or (name == "agreed" and code == said["code"])


@pytest.mark.fuzz(sample=100, whole=4000)
def test_json_is_what_python_reads_or_none(seed, tmp_path):
    """Bytes changed at random; the files of a run that hold them are refused alike."""
    draw = Draw(seed)
    content = bytearray(legal_line(draw, handshake_of(draw)))
    for _ in range(draw.randint(0, 3)):
        at, byte = draw.randrange(len(content)), draw.choice(b'[]{}",:0159eN\x00\xff')
        times = draw.choice([1, 1, 1, 300])
        content[at : at + draw.randint(0, 2)] = bytes([byte]) * times
    data = bytes(content)
    try:
        read = parse_json(data, longest=len(data))
    except ValueError:
        pass
    else:
        assert read == json.loads(data)
    (tmp_path / "metadata.json").write_bytes(data)
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        read_metadata(tmp_path / "metadata.json")


@pytest.mark.fuzz(sample=4, whole=80)
def test_ranks_meet_whatever_strangers_send(seed, monkeypatch):
    """A dozen strangers, in pieces and at once, before the rank that is waited for."""
    monkeypatch.setattr(rendezvous, "_MAX_STRANGERS", 4)
    draw, port, found = Draw(seed), free_port(), list[str]()

    def rank(number: int) -> None:
        cluster = Cluster(number, 2, coordinator=(HOST, port))
        shared, peers = rendezvous.rendezvous(
            cluster,
            FINGERPRINT,
            timeout=60,
            shared="the folder",
            report=lambda _: None,
        )
        found.append(shared)
        for connection in peers.values():
            connection.close()

    first = threading.Thread(target=rank, args=(0,), daemon=True)
    first.start()
    strangers = [connected(port + 1) for _ in range(12)]
    for stranger in strangers:
        line = illegal_line(draw, handshake_of(draw))
        with stranger if draw.random() < 0.7 else open_for_ever(stranger):
            try:
                for piece in (line[: len(line) // 2], line[len(line) // 2 :]):
                    stranger.sendall(piece)
            except OSError:
                continue  # turned away already
    second = threading.Thread(target=rank, args=(1,), daemon=True)
    second.start()
    for thread in (first, second):
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert found == ["the folder"] * 2
    for stranger in strangers:
        stranger.close()


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


class open_for_ever:
    """A stranger that sends something and stays."""

    def __init__(self, stranger: socket.socket) -> None:
        self.stranger = stranger

    def __enter__(self) -> socket.socket:
        return self.stranger

    def __exit__(self, *_: object) -> None:
        return
