# SPDX-License-Identifier: Apache-2.0
"""What asks for an answer, and the tokens that end one.

``tests/hf/test_chat.py`` compares both with Transformers.
"""

from functools import cache

import pytest

from tessera.errors import OperandError, TokenizerError
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.data.tokenization import ByteTokenizer, load_tokenizer
from tests.train.data.chat_folders import SPECIAL, TEMPLATES, turns, write_folder

pytest.importorskip("jinja2")
# <eos> of Gemma ends a text; in a conversation its models write the other one.
ENDS = {
    "gemma": {"<eos>", "<end_of_turn>"},
    "llama": {"<|eot_id|>"},
    "qwen": {"<|im_end|>"},
    "mistral": {"</s>"},
}
PROMPTS = {
    "gemma": "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] hi [/INST]",
}


def prompts_of(folder, family):
    folder = write_folder(folder, family, marked=False)
    return ChatPrompts(load_tokenizer(str(folder)), str(folder))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """The prompts of each family, whose template runs in a process."""
    return cache(lambda family: prompts_of(tmp_path_factory.mktemp(family), family))


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_ends_where_the_template_ends_a_turn(prompts, family):
    chat = prompts(family)
    expected = {chat.tokenizer.special_tokens[name] for name in ENDS[family]}
    for messages in (turns("hi"), turns("hi", "hello", "all?")):
        assert chat.ends(Conversation(messages)) == expected
    assert set(chat.tokenizer.special_tokens) == set(SPECIAL[family])


@pytest.mark.parametrize("family", PROMPTS)
def test_the_model_is_asked_for_an_answer(prompts, family):
    assert prompts(family).render(Conversation(turns("hi"))) == PROMPTS[family]


def test_names_of_special_tokens_in_a_message_end_nothing(prompts):
    """The end is what follows the answer, not the first such name of the text."""
    chat = prompts("qwen")
    messages = turns("<|endoftext|>", "a<|endoftext|>", "b")
    assert chat.ends(Conversation(messages)) == {
        chat.tokenizer.special_tokens["<|im_end|>"]
    }


def test_a_template_without_a_token_at_the_end_leaves_the_eos_token(tmp_path):
    folder = write_folder(tmp_path, "gemma", marked=False)
    for template in (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}",
        "{{ bos_token }}{{ messages[0].content }}",  # it does not write the answer
    ):
        (folder / "chat_template.jinja").write_text(template)
        chat = ChatPrompts(load_tokenizer(str(folder)), str(folder))
        assert chat.ends(Conversation(turns("hi"))) == {
            chat.tokenizer.special_tokens["<eos>"]
        }


def test_a_tokenizer_without_a_template_and_a_refused_conversation_are_errors(tmp_path):
    with pytest.raises(TokenizerError, match="of the kind bytes"):
        ChatPrompts(ByteTokenizer(), "bytes")
    with pytest.raises(OperandError, match=r"roles must alternate.*assistant, user"):
        prompts_of(tmp_path, "gemma").render(Conversation(turns("hi", "hello")[::-1]))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match=r"no chat_template\.jinja"):
        ChatPrompts(load_tokenizer(str(tmp_path)), str(tmp_path))
