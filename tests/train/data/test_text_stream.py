# SPDX-License-Identifier: Apache-2.0
"""The text of tokens as they come: no part of a character or of a stop text."""

import random

import pytest

from tessera.train.data.text_stream import TextStream, stream_texts
from tessera.train.data.tokenization import ByteTokenizer

TOKENIZER = ByteTokenizer()


def pieces(content: bytes, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(TOKENIZER, [256], stops)
    return [*(stream.push(byte) for byte in content), stream.finish()]


def test_no_character_is_cut() -> None:
    assert pieces("aé→🙂b".encode()) == [
        *("a", "", "é", "", "", "→", "", "", "", "🙂", "b", "")
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_text_whatever_the_bytes(seed: int) -> None:
    draw = random.Random(seed)
    content = draw.randbytes(20) + "é→🙂".encode()[: draw.randrange(9)]
    assert "".join(pieces(content)) == TOKENIZER.decode(content)


def test_an_incomplete_character_comes_at_the_end_alone() -> None:
    *before, last = pieces("a→".encode()[:-1])
    assert "".join(before) == "a"
    assert last == "\ufffd"


def test_text_ends_before_the_first_stop_text() -> None:
    assert "".join(pieces(b"one. two\n\nthree", ("\n\n", "thr"))) == "one. two"
    # What only begins like a stop text is not lost.
    assert "".join(pieces(b"a\nb\n", ("\n\n",))) == "a\nb\n"
    stream = TextStream(TOKENIZER, stops=["ab"])
    assert [stream.push(ord(c)) for c in "xaab"] == ["x", "", "a", ""]
    assert stream.is_ended
    assert stream.push(ord("y")) == stream.finish() == ""


def test_the_first_piece_is_decoded_after_the_prompt() -> None:
    class Words(ByteTokenizer):
        """As some tokenizers do, without the space before the first word."""

        def decode(self, ids: object) -> str:
            return " ".join(f"w{i}" for i in ids)  # type: ignore[attr-defined]

    stream = TextStream(Words(), [1, 2, 3, 4, 5])
    assert [stream.push(6), stream.push(7)] == [" w6", " w7"]


def test_each_row_has_its_text_after_each_token() -> None:
    end = 256
    tokens = [(0, ord("a")), (1, ord("x")), (0, ord("b")), (1, ord("s")), (0, end)]
    streams = [TextStream(TOKENIZER), TextStream(TOKENIZER, stops=["st"])]
    found = [*stream_texts(tokens, streams, {end})]
    # The last of each is what was held back.
    expected = [(0, "a"), (1, "x"), (0, "b"), (1, "")]
    assert found == [*expected, (0, ""), (1, "s")]
