# SPDX-License-Identifier: Apache-2.0
"""``ChatPrompts``: conversations that a model answers, and where its answers end."""

import json
from collections.abc import Sequence
from typing import Final

from tessera.errors import OperandError, TokenizerError
from tessera.train.data.chat_template import (
    Conversation,
    ConversationError,
    Message,
)
from tessera.train.data.encoding import chat_template_of
from tessera.train.data.tokenization import Tokenizer

# Unicode reserves it for use inside of a program.
_ANSWER: Final = "\ufdd2"
# No model that is still noise writes all three.
_LAST: Final = "\ufdd2\ufdd3\ufdd2"


class ChatPrompts:
    """A tokenizer's chat template, used to ask for an answer.

    Args:
      tokenizer: The tokenizer.
      name: Its name, as ``data.tokenizer`` has it.

    Raises:
      TokenizerError: [T605] it has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.tokenizer, self._template = chat_template_of(tokenizer, name)
        self._name = name

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> str:
        """The text that an answer follows.

        Raises:
          OperandError: [T401] the template does not accept these messages.
        """
        try:
            return self._template.render(
                conversation, add_generation_prompt=add_generation_prompt
            )
        except ConversationError as error:
            roles = ", ".join(str(one["role"]) for one in conversation.messages)
            raise OperandError(
                "the chat template does not accept the conversation",
                got=f"{error}; roles: {roles}",
                fix="use the roles that the template knows, in the order that it wants",
            ) from error

    def render_unfinished(self, messages: Sequence[Message]) -> str:
        """The text up to the end of the last message, which an answer continues.

        Raises:
          OperandError: [T401] the template does not accept these messages.
        """
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{_ANSWER}"}
        unfinished = Conversation([*before, marked])
        text = self.render(unfinished, add_generation_prompt=False)
        return text.partition(_ANSWER)[0]

    def encode_between(
        self, before: Conversation, answer: Sequence[int], new: Sequence[Message]
    ) -> list[int]:
        """The tokens from the end of an answer to the beginning of the next one.

        They are of what the template writes after the text of the answer. How it would
        write what is before that, once more messages follow, does not matter.

        Args:
          before: The conversation up to the answer.
          answer: Its tokens. What the template writes up to the last of them, such as
            ``<|im_end|>``, is left out here.
          new: The messages after it.

        Raises:
          OperandError: [T401] the template does not accept these messages.
          TokenizerError: [T605] it does not write the answer once, or leaves out a new
            message, so it is not known what follows.
        """
        marked = [*before.messages, {"role": "assistant", "content": _LAST}, *new]
        text = self.render(before._replace(messages=marked))
        _, _, after = text.partition(_LAST)
        contents = [str(message["content"]) for message in new]
        # Llama 3.1 writes what a tool returned as JSON.
        if text.count(_LAST) != 1 or not all(
            one.strip() in after or json.dumps(one, ensure_ascii=False) in after
            for one in contents
        ):
            raise TokenizerError(
                f"the chat template of {self._name} does not write what comes next",
                got=f"{text.count(_LAST)} times the answer; {after!r:.100} for roles "
                f"{', '.join(str(message['role']) for message in new)}",
                fix="answer in a role that the template writes, such as user",
            )
        ids = self.tokenizer.encode_chat(after)[0].tolist()
        if answer and answer[-1] in ids:
            end = ids[: ids.index(answer[-1]) + 1]
            # Not that after the next message, where the template ends no answer by it.
            is_blank = not self.tokenizer.decode(end).strip()
            if is_blank or end == [*answer[-len(end) :]]:
                return ids[len(end) :]
        return ids

    def ends(self, conversation: Conversation) -> set[int]:
        """The tokens that end an answer to a conversation.

        They are the tokenizer's ``eos_token``, and the first special token that the
        template writes after an answer: ``<end_of_turn>`` of Gemma, which may be no
        ``eos_token`` of the model's files.
        """
        special = self.tokenizer.special_tokens
        eos = special.get(self.tokenizer.folder.special_tokens.get("eos_token", ""))
        answer = {"role": "assistant", "content": _ANSWER}
        answered = conversation._replace(messages=[*conversation.messages, answer])
        text = self.render(answered, add_generation_prompt=False)
        after, _ = self.tokenizer.encode_chat(text.partition(_ANSWER)[2])
        ends = (i for i in after.tolist() if i in special.values())
        return {i for i in (eos, next(ends, None)) if i is not None}
