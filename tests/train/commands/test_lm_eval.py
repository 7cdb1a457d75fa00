# SPDX-License-Identifier: Apache-2.0
"""The model of lm-evaluation-harness; ``tests/hf`` compares it with the ``hf`` model.

Log-likelihoods themselves are in ``tests/train/loop/test_log_likelihood.py``.
"""

import sys
from types import SimpleNamespace

import jax
import pytest

from tessera.errors import OperandError
from tessera.train.commands import lm_eval
from tessera.train.loop.log_likelihood import log_likelihoods
from tessera.train.rollouts import generate
from tests.train.data import chat_folders
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

tokenizers = pytest.importorskip("tokenizers")
MOST = 32
BEGIN, EOS, TURN, END = 261, 262, 263, 264


class Cache:
    """Remembers what the harness would."""

    def __init__(self):
        self.entries = {}

    def add_partial(self, kind, request, result):
        self.entries[kind, str(request)] = result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    values = {**GEMMA3, "vocab_size": 300, "eos_token_id": EOS}
    folder = tmp_path_factory.mktemp("harness") / "gemma"
    write_folder(folder, gemma3_tensors(values), values)
    chat_folders.write_folder(folder, "gemma", marked=False)
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BEGIN)]
    )
    tokenizer.save(path)
    return folder


@pytest.fixture
def model(folder):
    model = lm_eval.HarnessMethods(str(folder), max_length=MOST, batch_size="3")
    model.cache_hook = Cache()
    return model


def request(*arguments):
    return SimpleNamespace(args=arguments)


def test_a_text_has_one_beginning_and_its_special_tokens(model):
    begun = model.tok_encode("hello<end_of_turn>")
    assert begun[0] == BEGIN
    assert begun[-1] == END
    assert model.tok_encode("<bos>hello<end_of_turn>") == begun
    assert model.tok_encode("hello<end_of_turn>", add_special_tokens=False) == begun[1:]
    assert model.tok_encode("<bos>hello", add_special_tokens=True)[:2] == [BEGIN, BEGIN]
    assert model.eot_token_id == BEGIN


def test_a_chat_ends_where_its_turns_end(model):
    turns = chat_folders.turns("hi", "hello", "all?")
    assert model._stops == (EOS,)
    text = model.apply_chat_template(turns)
    assert text.endswith("all?<end_of_turn>\n<start_of_turn>model\n")
    assert model.tok_encode(text).count(BEGIN) == 1
    assert model._stops == (EOS, END)
    unfinished = model.apply_chat_template(turns[:2], add_generation_prompt=False)
    assert unfinished.endswith("<start_of_turn>model\nhello")
    assert "start_of_turn" in model.chat_template(True)


def test_scores_are_remembered_by_their_texts(model):
    pairs = [([1, 2], [3]), ([4], [5, 6])]
    results = model._loglikelihood_tokens([(("a", "b"), *pairs[0]), (None, *pairs[1])])
    trained = model._trained
    assert results == log_likelihoods(
        trained.model, trained.read(None), pairs, max_length=MOST, batch_size=3
    )
    assert model.cache_hook.entries == {("loglikelihood", "('a', 'b')"): results[0]}


def test_a_long_text_is_scored_token_by_token_once(model):
    pytest.importorskip("lm_eval")
    model.prefix_token_id = BEGIN
    text = "the hello all " * 8
    ids = [BEGIN, *model.tok_encode(text)]
    pairs = [(ids[:1], ids[1 : MOST + 1])]
    for start in range(MOST + 1, len(ids), MOST):
        last = min(start + MOST, len(ids))
        pairs.append((ids[last - MOST - 1 : start], ids[start:last]))
    assert sum(len(continuation) for _, continuation in pairs) == len(ids) - 1
    trained = model._trained
    nats = log_likelihoods(
        trained.model, trained.read(None), pairs, max_length=MOST, batch_size=1
    )
    (total,) = model.loglikelihood_rolling([request(text)])
    assert total == pytest.approx(sum(one for one, _ in nats), rel=1e-5)


@pytest.mark.full
def test_texts_are_those_of_each_context_alone(model):
    """The last tokens of a context are read, and stop texts are those of a request."""
    pytest.importorskip("lm_eval")
    greedy = {"do_sample": False, "max_gen_toks": 8, "until": []}
    contexts = ["hello", "x", "the hello all " * 8, "why", "hello all"]
    texts = model.generate_until([request(one, greedy) for one in contexts])
    trained, expected = model._trained, []
    for context in contexts:
        ids = model.tok_encode(context)[-(MOST - 8) :]
        made = generate(
            *(trained.model, trained.read(None), [ids], 8, jax.random.key(0)),
            temperature=0,
            stop_tokens=[EOS],
        )[0, len(ids) :]
        expected.append(trained.tokenizer.decode(made[made >= 0]))
    assert texts == expected
    stop = next(iter(texts[0].strip()))
    requests = [request("hello", {**greedy, "until": [stop]}), request("x", greedy)]
    assert model.generate_until(requests) == [texts[0].partition(stop)[0], texts[1]]
    sampled = {**greedy, "do_sample": True, "temperature": 2.0}
    alone = model.generate_until([request("hello", sampled)])
    beside = [request("hello", sampled), request("why hello", sampled)]
    assert model.generate_until(beside)[0] == alone[0] != texts[0]


def test_what_cannot_be_generated_is_refused(model):
    pytest.importorskip("lm_eval")
    for options, got in {
        "num_beams=4": {"num_beams": 4},
        "-68": {"max_gen_toks": 100},
    }.items():
        with pytest.raises(OperandError) as caught:
            model.generate_until([request("hello", {"until": [], **got})])
        assert caught.value.got == options


@pytest.mark.parametrize(
    "sizes", [{"batch_size": "auto"}, {"batch_size": 0}, {"max_length": -1}]
)
def test_sizes_are_numbers_above_zero(folder, sizes):
    with pytest.raises(OperandError, match="is a number above 0"):
        lm_eval.HarnessMethods(str(folder), **sizes)


def test_without_the_harness_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    lm_eval.register.cache_clear()
    assert lm_eval.main(["run"]) == OperandError.exit_code
    assert "pip install 'tessera-spmd[eval]'" in capsys.readouterr().err
