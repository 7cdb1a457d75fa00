# SPDX-License-Identifier: Apache-2.0
"""Made-up tokens: the same everywhere, and worth learning."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import SettingValueError, TokenizerError
from tessera.train.data.data_config import SyntheticConfig
from tessera.train.data.synthetic import SyntheticTokenizer, make_documents


def tokens(vocab_size=50, seed=0, **settings) -> np.ndarray:
    documents = make_documents(SyntheticConfig(**settings), vocab_size, seed)
    return np.concatenate(documents)


@given(st.integers(2, 300_000), st.integers(1, 3000), st.integers(-5, 2**70))
def test_there_are_as_many_tokens_as_asked_for_and_all_are_legal(size, count, seed):
    ids = tokens(size, seed, tokens=count, noise=0.5)
    assert ids.dtype == np.int32
    assert ids.size == count
    assert ids.min() >= 1
    assert ids.max() < size


def test_the_tokens_are_the_same_on_every_machine_and_numpy():
    digest = hashlib.blake2b(tokens(tokens=10_000).tobytes(), digest_size=8)
    assert digest.hexdigest() == "daeb32ec0cea629a"


def test_more_tokens_than_the_memory_holds_are_refused():
    with pytest.raises(SettingValueError) as caught:
        tokens(tokens=10**15)
    most = int(caught.value.fix.removesuffix(" at most").rpartition("=")[2])
    assert 10**6 < most < 10**15


def test_seeds_give_other_tokens():
    assert not np.array_equal(tokens(tokens=100), tokens(tokens=100, seed=1))


def agreement(ids: np.ndarray) -> float:
    """How often the commonest successor of a token follows it."""
    pairs, counts = np.unique(np.stack([ids[:-1], ids[1:]]), axis=1, return_counts=True)
    best = np.zeros(ids.max() + 1, np.int64)
    np.maximum.at(best, pairs[0], counts)
    return float(best.sum() / (ids.size - 1))


def test_the_next_token_can_be_learnt_and_noise_makes_it_harder():
    # 2048 places in patterns over 10**6 ids: nearly every id stands in one place.
    exact = agreement(tokens(10**6, tokens=200_000, noise=0))
    # 31 of 32 successors are certain, and the pattern that follows is one of 64.
    assert exact == pytest.approx(31 / 32 + 1 / 32 / 64, abs=0.01)
    noisy = agreement(tokens(10**6, tokens=200_000, noise=0.3))
    # Both tokens are kept, or the first is noise: seen once, its own best guess.
    assert noisy == pytest.approx(0.7 * 0.7 * exact + 0.3, abs=0.02)
    assert agreement(tokens(257, tokens=200_000, noise=1)) < 0.02


def test_documents_differ_in_length():
    documents = make_documents(SyntheticConfig(tokens=50_000), 50, 0)
    lengths = {ids.size for ids in documents[:-1]}
    assert lengths == {32 * count for count in range(1, 17)}


def test_text_of_numbers_goes_there_and_back():
    tokenizer = SyntheticTokenizer(50)
    assert tokenizer.encode(b"7 42\n3").tolist() == [7, 42, 3]
    assert tokenizer.decode(np.array([0, 7, 42])) == "7 42"


def test_text_that_is_not_numbers_is_refused():
    with pytest.raises(TokenizerError) as caught:
        SyntheticTokenizer(50).encode("def f")
    assert str(caught.value) == (
        "[T605] the text of synthetic data consists of numbers\n"
        "  got: 'def f'\n"
        "  fix: write ids separated by spaces: '7 42'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T605.html"
    )
