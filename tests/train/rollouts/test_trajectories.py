# SPDX-License-Identifier: Apache-2.0
"""Turns of a model and an environment: whose tokens they are, and which ones.

The model is a script; the chat templates are those of ``chat_folders``.
"""

from functools import cache

import jax
import numpy as np
import pytest

from tessera.errors import OperandError, TokenizerError
from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.data.tokenization import load_tokenizer
from tests.train.data.chat_folders import template_of, turns, write_folder
from tests.train.rollouts.conversations import (
    Echo,
    Fails,
    Returns,
    Script,
    keys_of,
    run,
)

pytest.importorskip("jinja2")
END = {"gemma": "<end_of_turn>", "llama": "<|eot_id|>", "qwen": "<|im_end|>"}
# What the templates write from the end of an answer to the next one.
BETWEEN = {
    "gemma": "\n<start_of_turn>user\necho one<end_of_turn>\n<start_of_turn>model\n",
    "llama": "<|start_header_id|>user<|end_header_id|>\n\necho one<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen": "\n<|im_start|>user\necho one<|im_end|>\n<|im_start|>assistant\n",
}
# Qwen writes what tools return as a part of what the user says.
QWEN_TOOLS = """
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}"""


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """The chat template of each family, which runs in a process."""

    @cache
    def made(family, source=""):
        folder = tmp_path_factory.mktemp("chat")
        write_folder(folder, family, marked=False)
        if source:
            (folder / "chat_template.jinja").write_text(source)
        return ChatPrompts(load_tokenizer(str(folder)), "my_folder")

    return made


@pytest.fixture(scope="module")
def qwen(chats):
    old = "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}"
    source = template_of("qwen", marked=False)
    assert source.count(old) == 1
    return chats("qwen", source.replace(old, QWEN_TOOLS))


def encoded(chat, text):
    return chat.tokenizer.encode_chat(text)[0].tolist()


def talk(chat, *written, environment=None):
    """The trajectory of one conversation, in which the model writes these turns."""
    script, made = Script(chat.tokenizer, written), environment or Echo()
    return run(chat, script, lambda _: made, turns("hi"))[0][0]


# --- tokens


@pytest.mark.parametrize("family", END)
def test_a_turn_follows_what_the_model_wrote_and_what_the_template_adds(chats, family):
    chat = chats(family)
    end = END[family]
    script = Script(chat.tokenizer, [f"one{end}", f"two{end}"])
    (found,), prompt = run(chat, script, lambda _: Echo(), turns("hi"))
    own = encoded(chat, f"one{end}"), encoded(chat, f"two{end}")
    between = encoded(chat, BETWEEN[family])
    assert found.tokens.tolist() == [*own[0], *between, *own[1]]
    assert [len(ids) for ids, _ in script.calls] == [1, 1]
    assert script.calls[1][0] == [[*prompt, *own[0], *between]]
    expected = [True] * len(own[0]) + [False] * len(between) + [True] * len(own[1])
    assert found.is_own.tolist() == expected
    np.testing.assert_array_equal(
        found.log_probs,
        np.concatenate(
            [
                -0.25 - np.arange(len(own[0])),
                0 * np.array(between),
                -0.25 - np.arange(len(own[1])),
            ]
        ),
    )
    assert found.tokens.dtype == np.int32
    assert found.log_probs.dtype == np.float32
    assert found.is_own.dtype == np.bool_
    assert (found.ended, found.failure) == (True, "")
    assert [one["content"] for one in found.messages] == ["one", "echo one", "two"]


@pytest.mark.parametrize("family", ["gemma", "qwen"])
def test_where_the_template_repeats_what_was_written_the_tokens_are_its_own(
    chats, family
):
    """Llama's are not: its tokenizer joins the line breaks at the end of a prompt."""
    chat, end = chats(family), END[family]
    script = Script(chat.tokenizer, [f"one{end}", f"two{end}"])
    (found,), prompt = run(chat, script, lambda _: Echo(), turns("hi"))
    said = Conversation([*turns("hi"), *found.messages])
    whole = chat.render(said, add_generation_prompt=False).removesuffix("\n")
    # Qwen's puts an empty thought into the last answer alone.
    whole = whole.replace("<think>\n\n</think>\n\n", "")
    assert [*prompt, *found.tokens.tolist()] == encoded(chat, whole)


def test_tokens_are_never_decoded_and_encoded_again(chats):
    """``h`` and ``e`` are two tokens of the model, and one of the tokenizer's."""
    chat = chats("llama")
    (end,) = encoded(chat, "<|eot_id|>")
    letters = [encoded(chat, letter)[0] for letter in "he"]
    assert len(encoded(chat, "he")) == 1
    script = Script(chat.tokenizer, [[*letters, end], [end]])
    (found,), prompt = run(chat, script, lambda _: Echo(), turns("hi"))
    assert found.tokens[:3].tolist() == [*letters, end]
    assert script.calls[1][0][0][: len(prompt) + 3] == [*prompt, *letters, end]
    assert found.messages[0]["content"] == "he"


def test_invalid_utf8_and_spaces_that_a_template_trims_stay(chats):
    chat = chats("gemma")
    end = encoded(chat, "<end_of_turn>")
    half = encoded(chat, "é")[:1]
    assert len(encoded(chat, "é")) == 2
    own = [*encoded(chat, "  a"), *half, *encoded(chat, " \n"), *end]
    found = talk(chat, own, end)
    assert found.tokens[: len(own)].tolist() == own
    assert found.messages[0]["content"] == "  a\ufffd \n"


def test_thoughts_of_earlier_turns_stay_as_the_model_wrote_them(qwen):
    """Qwen 3's template leaves them out of what is before a user's message."""
    first = "<think>\nhm\n</think>\n\none<|im_end|>"
    found = talk(qwen, first, "two<|im_end|>")
    assert found.tokens[: len(encoded(qwen, first))].tolist() == encoded(qwen, first)


def test_the_results_of_several_tools_are_written_as_the_template_writes_them(qwen):
    results = [{"role": "tool", "content": text} for text in ("84", "7")]

    class Two(Echo):
        def step(self, messages):
            _, reward, done = super().step(messages)
            return ([] if done else results), reward, done

    found = talk(qwen, "call<|im_end|>", "two<|im_end|>", environment=Two())
    between = found.tokens[~found.is_own]
    expected = (
        "\n<|im_start|>user\n<tool_response>\n84\n</tool_response>"
        "\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert between.tolist() == encoded(qwen, expected)


def test_an_end_that_is_not_the_templates_is_followed_by_the_whole_template(chats):
    chat = chats("gemma")
    found = talk(chat, "one<eos>", "two<end_of_turn>")
    text = f"one<eos><end_of_turn>{BETWEEN['gemma']}two<end_of_turn>"
    assert found.tokens.tolist() == encoded(chat, text)
    assert found.is_own.sum() == len(encoded(chat, "one<eos>two<end_of_turn>"))


ENDS = {
    # Llama 2's has a space before the end; Cohere's has two tokens there.
    "a space": ("{{ ' ' + m.content + ' <|eot_id|>' }}", "a<|eot_id|>", 0),
    "two tokens": (
        "{{ m.content + '<|begin_of_text|><|eot_id|>' }}",
        "a<|begin_of_text|><|eot_id|>",
        0,
    ),
    "the second of two": (
        "{{ m.content + '<|begin_of_text|><|eot_id|>' }}",
        "a<|eot_id|>",
        0,
    ),
    "text as the model wrote it": (
        "{{ m.content + '.<|eot_id|>' }}",
        "a.<|eot_id|>",
        0,
    ),
    "text that it did not write": ("{{ m.content + '.<|eot_id|>' }}", "a<|eot_id|>", 2),
    "none": ("{{ m.content + '\n' }}", "a<|eot_id|>", 1),
}


@pytest.mark.parametrize("kind", ENDS)
def test_what_the_model_wrote_of_an_end_is_not_written_again(chats, kind):
    answer, own, extra = ENDS[kind]
    chat = chats(
        "llama",
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + "
        "'<|eot_id|>' }}{% else %}" + answer + "{% endif %}{% endfor %}{{ 'A:' }}",
    )
    found = talk(chat, own, "b<|eot_id|>")
    between = found.tokens[~found.is_own].tolist()
    expected = encoded(chat, f"Q: echo {found.messages[0]['content']}<|eot_id|>A:")
    assert between[extra:] == expected, chat.tokenizer.decode(between)


def test_a_template_that_leaves_out_what_a_tool_says_is_an_error(chats):
    """Else the model would be asked again as if nothing had been said."""
    chat = chats("qwen")  # which knows no tool
    with pytest.raises(
        TokenizerError, match="my_folder does not write what comes"
    ) as caught:
        talk(chat, "one<|im_end|>", environment=Echo(role="tool"))
    assert "roles tool" in str(caught.value)


def test_a_template_that_writes_no_answer_or_two_is_an_error(chats):
    for text in ("{{ messages[0].content }}", "{{ messages }}{{ messages }}"):
        chat = chats("llama", "{{ bos_token }}" + text)
        with pytest.raises(TokenizerError, match="times the answer"):
            talk(chat, "one<|eot_id|>")


def test_a_template_that_refuses_a_role_is_an_error_that_names_the_roles(chats):
    twice = Returns(([{"role": "user", "content": "x"}] * 2, None, False))
    with pytest.raises(OperandError, match="roles: user, assistant, user, user"):
        talk(chats("gemma"), "one<end_of_turn>", environment=twice)


def test_what_a_tool_says_may_be_written_as_json(chats):
    plain = "{{- message['content'] | trim + '<|eot_id|>' }}"
    *rest, last = template_of("llama", marked=False).split(plain)
    source = plain.join(rest) + plain.replace("trim", "tojson") + last
    chat = chats("llama", source)
    found = talk(
        chat, 'a"b<|eot_id|>', "two<|eot_id|>", environment=Echo(role="ipython")
    )
    between = chat.tokenizer.decode(found.tokens[~found.is_own])
    assert 'ipython\n\n"echo a\\"b"assistant' in between


# --- several conversations


def test_conversations_end_on_their_own_and_the_others_go_on(chats):
    chat = chats("llama")
    end = "<|eot_id|>"
    script = Script(
        chat.tokenizer,
        [f"a{i}{end}" for i in range(3)],
        [f"b{end}"],
        [f"c{i}{end}" for i in range(2)],
    )
    made = [Echo(times=2, reward=0.5), Echo(times=0), Echo(times=1, reward=0)]
    found, _ = run(chat, script, made.__getitem__, turns("hi"), count=3)
    assert [len(ids) for ids, _ in script.calls] == [3, 2, 1]
    assert [one.reward for one in found] == [1.5, None, 0.0]
    texts = [[m["content"] for m in one.messages[::2]] for one in found]
    assert texts == [["a0", "a1", "a2"], ["b"], ["c0", "c1"]]
    # Each sees its own conversation, and may change its copy.
    assert [m["content"] for m in made[0].seen[1]] == ["hi", "a0", "echo a0", "a1"]


def test_a_conversation_alone_is_what_it_is_among_others(chats):
    """Whatever ends the others: their environment, a cut turn, tokens, a failure."""
    chat = chats("gemma")
    draw = np.random.default_rng(3)
    ends = ["<end_of_turn>", "<eos>", ""]
    turns_of = [
        [
            "".join(draw.choice([*"helo é"], draw.integers(0, 9)))
            + ends[draw.choice(3, p=[0.6, 0.2, 0.2])]
            or "x"
            for _ in range(8)
        ]
        for _ in range(12)
    ]

    def make(i):
        return Fails("x") if i == 5 else Echo(times=i % 4, reward=i)

    def found(only=None):
        script = Script(chat.tokenizer, *turns_of)
        options = {"count": 12, "only": only, "max_tokens": 90, "max_turns": 4}
        return run(chat, script, make, turns("hi"), **options)[0]

    together = found()
    assert {one.ended for one in together} == {True, False}
    assert len({len(one.messages) for one in together}) > 3
    for i, one in enumerate(together):
        (alone,) = found([i])
        for name in ("tokens", "log_probs", "is_own"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(one, name))
        assert (alone.messages, alone.ended) == (one.messages, one.ended)
        assert (alone.reward, alone.failure) == (one.reward, one.failure)


def test_the_key_of_a_turn_is_folded_from_that_of_the_completion(chats):
    chat = chats("llama")
    end = "<|eot_id|>"
    script = Script(chat.tokenizer, [f"a{end}"] * 2, [f"b{end}"], [f"c{end}"] * 2)
    made = [Echo(), Echo(times=0), Echo()]
    run(chat, script, made.__getitem__, turns("hi"), count=3)
    keys = keys_of(3)
    for turn, numbers in enumerate(([0, 1, 2], [0, 2])):
        expected = [
            jax.random.key_data(jax.random.fold_in(keys[i], turn)).tolist()
            for i in numbers
        ]
        assert script.calls[turn][1] == expected


def endless(chat, **limits):
    script = Script(chat.tokenizer, [f"a{i}<|eot_id|>" for i in range(9)])
    (found,), _ = run(chat, script, lambda _: Echo(times=99), turns("hi"), **limits)
    return found, len(script.calls)


def test_turns_have_a_limit(chats):
    found, calls = endless(chats("llama"), max_turns=3)
    assert (calls, found.ended) == (3, True)
    # Nothing follows the last turn: the environment's last message has no tokens.
    assert found.is_own[-1]
    assert [one["role"] for one in found.messages] == ["assistant", "user"] * 3


def test_tokens_have_a_limit(chats):
    """What does not fit is cut, and what the environment says is not begun."""
    chat = chats("llama")
    whole, _ = endless(chat, max_turns=3)
    last = len(encoded(chat, "a2<|eot_id|>"))
    between = int((~whole.is_own).sum()) // 2
    size = len(whole.tokens)
    for limit, expected in {
        size: (size, True),
        size - 1: (size - 1, False),
        size - last + 1: (size - last + 1, False),
        size - last: (size - last - between, False),
        size - last - 1: (size - last - between, False),
    }.items():
        found, _ = endless(chat, max_turns=3, max_tokens=limit)
        assert (len(found.tokens), found.ended) == expected, limit
        np.testing.assert_array_equal(found.tokens, whole.tokens[: len(found.tokens)])
        np.testing.assert_array_equal(found.is_own, whole.is_own[: len(found.tokens)])


def test_a_turn_that_was_cut_is_seen_and_nothing_follows_it(chats):
    chat = chats("llama")
    script = Script(chat.tokenizer, ["and so on"])
    made = Echo(times=5, reward=1)
    (found,), _ = run(chat, script, lambda _: made, turns("hi"))
    assert (found.ended, found.reward, len(script.calls)) == (False, 1.0, 1)
    assert made.seen[0][-1] == {"role": "assistant", "content": "and so on"}


def test_an_empty_turn_is_a_turn(chats):
    chat = chats("llama")
    found = talk(chat, "<|eot_id|>", "a<|eot_id|>")
    assert [one["content"] for one in found.messages] == ["", "echo ", "a"]


# --- environments that fail

USER = [{"role": "user", "content": "x"}]
BAD = {
    "nothing": None,
    "two values": ([], 1.0),
    "text": "abc",
    "a message, no list": (USER[0], 1.0, False),
    "no content": ([{"role": "user"}], 1.0, False),
    "parts": ([{"role": "tool", "content": [1]}], 1.0, False),
    "the model's role": ([{"role": "assistant", "content": ""}], 0.0, False),
    "half a surrogate pair": ([{"role": "tool", "content": "\ud800"}], 0.0, False),
    "no message and no end": ([], 1.0, False),
    "NaN": (USER, float("nan"), False),
    "inf": (USER, float("inf"), True),
    "too large": (USER, 10**400, True),
    "text for a reward": (USER, "1", True),
    "text for the end": (USER, 1.0, "False"),
    "a list for a reward": (USER, [1.0], True),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_answer_costs_its_own_completion(chats, kind):
    chat = chats("llama")
    script = Script(chat.tokenizer, ["a<|eot_id|>"], ["b<|eot_id|>"])
    made = [Returns(BAD[kind]), Echo(times=0, reward=1)]
    found, _ = run(chat, script, made.__getitem__, turns("hi"), count=2)
    assert [one.reward for one in found] == [None, 1.0]
    assert found[0].failure == (
        "did not return (new messages unless done, finite reward or None, done) "
        f"({BAD[kind]!r:.200})"
    )
    assert (found[0].ended, found[1].failure) == (True, "")


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ((None, 1, True), 1.0),
        ((USER, True, 1), 1.0),
        (([], np.float32(0.5), np.True_), 0.5),
    ],
    ids=["nothing said", "a bool", "of NumPy"],
)
def test_what_users_return_for_numbers_and_no_messages_is_an_answer(
    chats, value, reward
):
    chat = chats("llama")
    found = talk(chat, "a<|eot_id|>", environment=Returns(value))
    assert (found.reward, found.failure) == (reward, "")


def test_environments_that_raise_exit_or_hang_cost_their_own_completions(chats):
    chat = chats("llama")
    end = "<|eot_id|>"
    script = Script(chat.tokenizer, *([f"a{end}"] * 2 for _ in range(5)))
    made = [Fails("hangs"), Echo(reward=1), Fails("exits"), Fails("x"), None]

    def make(i):
        if made[i] is None:
            raise RuntimeError("no display")
        return made[i]

    found, _ = run(chat, script, make, turns("hi"), count=5, time_limit=1.0)
    assert [one.reward for one in found] == [None, 2.0, None, None, None]
    assert found[0].failure == "took longer than 1 s"
    assert found[2].failure.startswith("raised SystemExit (3, ")
    assert "raised KeyError ('x', " in found[3].failure
    assert "conversations.py:" in found[3].failure
    assert found[4].failure.startswith("raised RuntimeError (no display, ")


def test_a_failure_takes_back_the_rewards_of_earlier_turns(chats):
    class Later(Echo):
        def step(self, messages):
            if self.left == 0:
                raise ValueError("later")
            return super().step(messages)

    chat = chats("llama")
    found = talk(chat, "a<|eot_id|>", "b<|eot_id|>", environment=Later(reward=1))
    assert found.reward is None
    assert "later" in found.failure
