# SPDX-License-Identifier: Apache-2.0
"""The perplexity of a run, or of a folder of Hugging Face, on files of text.

tessera evaluate outputs/mine --data books --data web.jsonl

Each --data is a source of its own: a file, a folder or a glob. A document is a text
file or a record of JSON lines. The standard error is over the documents of a source.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tessera.errors import EmptyDataError, OperandError
from tessera.train.commands.model_argument import model_parser, open_model, run_command

if TYPE_CHECKING:
    import numpy as np

    from tessera.train.loop.trained_model import TrainedModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate what the command line asks for; the exit code."""
    return run_command(_parser(), _lines, arguments)


def _parser() -> ArgumentParser:
    parser = model_parser("evaluate", __doc__)
    add = parser.add_argument
    add("--data", action="append", required=True, help="a source; repeatable")
    add("--text-key", default="text", help="of JSON lines: the key of the text; text")
    add("--length", type=int, default=1024, help="tokens of a window; 1024")
    add("--json", action="store_true", help="write each source as a line of JSON")
    return parser


def _lines(options: Namespace) -> Iterator[str]:
    """A line for each source, once it is evaluated."""
    if options.length < 1:
        raise OperandError(
            "a window has tokens", got=f"--length={options.length}", fix="use 1 or more"
        )
    trained, mesh = open_model(options)
    from tessera.train.loop.perplexity import perplexity

    # Everything is read before anything is compiled.
    sources = {
        path: list(_documents(path, options.text_key, trained)) for path in options.data
    }
    for path, documents in sources.items():
        if not any(len(ids) > 1 for ids in documents):
            raise EmptyDataError(
                f"there is nothing to evaluate in {path!r}",
                got=f"{len(documents)} documents, none with a token to predict",
                fix="name files with text",
            )
    params = trained.read(mesh)
    for path, documents in sources.items():
        result = perplexity(trained.model, params, documents, options.length, mesh)
        if options.json:
            figures = {"perplexity": result.value, "error": result.error}
            figures = {"data": path, **figures, **vars(result)}
            # JSON has no NaN, which is the error of one document.
            figures = {k: v if v == v else None for k, v in figures.items()}
            yield f"{json.dumps(figures)}\n"
        else:
            error = f"{result.error:.3g}" if result.documents > 1 else "unknown"
            yield (
                f"{path}: perplexity {result.value:.4g}, standard error {error}; "
                f"{result.nats:.4f} nats per token, {result.tokens:,} tokens, "
                f"{result.documents:,} documents\n"
            )


def _documents(
    path: str, text_key: str, trained: "TrainedModel"
) -> Iterator["np.ndarray"]:
    """The token ids of each document, after those that precede every text."""
    import numpy as np

    from tessera.train.data.data_config import DataConfig
    from tessera.train.data.encoding import Encoder
    from tessera.train.data.files import list_files
    from tessera.train.data.records import read_records

    config = DataConfig(
        name="text", path=path, text_key=text_key, tokenizer=trained.tokenizer_name
    )
    encoder = Encoder(config, trained.model.vocab_size)
    for unit in list_files(path):
        for record in read_records(unit, config, set()):
            ids = encoder.encode(record, set()).ids
            yield np.array([*trained.prefix, *ids], np.int32)
