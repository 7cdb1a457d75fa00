# SPDX-License-Identifier: Apache-2.0
"""``TextStream``: text from tokens that arrive one by one."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from tessera.train.data.tokenization import Tokenizer

_INCOMPLETE = "\ufffd"
# Tokens whose text a tokenizer may join with that of the next one.
_CONTEXT = 4


class TextStream:
    """The text of a row of tokens, up to a stop text, in whole characters.

    Bytes of a character that more tokens may complete are held back, and so is text
    that may be the beginning of a stop text.

    Args:
      tokenizer: Its ``decode`` is called for a few tokens at a time.
      prompt: The tokens before; a token's text may depend on the one before it.
      stops: The text ends before the first of these; none is empty.

    Attributes:
      is_ended: Whether a stop text has come.

    Example:
      >>> from tessera.train.data.tokenization import ByteTokenizer
      >>> stream = TextStream(ByteTokenizer())
      >>> [stream.push(token) for token in "hé".encode()]
      ['h', '', 'é']
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        # Text up to the token of this index was released.
        self._ids = list(prompt[-_CONTEXT:])
        self._released = len(self._ids)
        self._held = ""
        self.is_ended = False

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        return self._release(self._new_text(), is_last=False)

    def finish(self) -> str:
        """The text that was held back; incomplete characters become U+FFFD."""
        return self._release(self._new_text(is_last=True), is_last=True)

    def _new_text(self, *, is_last: bool = False) -> str:
        before = self._tokenizer.decode(self._ids[: self._released])
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_INCOMPLETE) and not is_last:
            return ""
        self._ids = self._ids[self._released :] or self._ids
        self._released = len(self._ids)
        return text[len(before) :]

    def _release(self, text: str, *, is_last: bool) -> str:
        if self.is_ended:
            return ""
        held = self._held + text
        starts = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if starts:
            self.is_ended, self._held = True, ""
            return held[: min(starts)]
        begun = (
            size
            for stop in self._stops
            for size in range(1, len(stop))
            if held.endswith(stop[:size])
        )
        end = len(held) - (0 if is_last else max(begun, default=0))
        self._held = held[end:]
        return held[:end]


def stream_texts(
    tokens: Iterable[tuple[int, int]],
    streams: Sequence[TextStream],
    stop_tokens: Collection[int],
) -> Iterator[tuple[int, str]]:
    """The index of a row and its new text, and at last what each held back.

    Args:
      tokens: The index of a row and its next token, as from ``Sampler.stream``.
      streams: That of each row.
      stop_tokens: These have no text.
    """
    for row, token in tokens:
        if token not in stop_tokens:
            yield row, streams[row].push(token)
    for row, stream in enumerate(streams):
        yield row, stream.finish()
