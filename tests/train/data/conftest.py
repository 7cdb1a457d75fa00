# SPDX-License-Identifier: Apache-2.0
"""A small sentencepiece model."""

import io
import warnings

import pytest

TEXTS = ["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n"] * 20


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    with warnings.catch_warnings():
        # SWIG's types warn on Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=written,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path
