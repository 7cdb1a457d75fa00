# SPDX-License-Identifier: Apache-2.0
"""Continues prompts with the model of a run, or of a folder of Hugging Face.

tessera generate outputs/mine "def main(" --max-tokens=100 --temperature=0.8
tessera generate folder "One." "Two." --mesh='[[1,4],[fsdp,tp]]'

The text of one prompt is written as it is generated. Of several prompts, each is a line
of JSON with its prompt and its text, in the order of the prompts.
"""

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tessera.errors import DataNotFoundError, OperandError, TesseraError


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate what the command line asks for; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        prompts = _prompts(options)
        for text in _texts(options, prompts):
            sys.stdout.write(text)
            sys.stdout.flush()
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "tessera generate",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a run, its checkpoints, one of them, or a folder")
    add("prompts", nargs="*", metavar="prompt", help="several make a batch")
    add("--prompts-file", help="a file with one prompt in each line")
    add("--max-tokens", type=int, default=128, help="the most that are added; 128")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    add("--top-k", type=int, help="sample from the k likeliest tokens")
    add("--top-p", type=float, help="sample from those with this probability together")
    add("--seed", type=int, default=0, help="of the samples; 0")
    add("--stop", action="append", default=[], help="end before this text; repeatable")
    add("--module", action="append", default=[], help="imported first; repeatable")
    add("--mesh", help="sizes and axes, such as [[1,4],[fsdp,tp]]; one device")
    add("--cache-dtype", choices=("f32", "bf16", "f16"), help="of keys and values")
    return parser


def _prompts(options: Namespace) -> list[str]:
    prompts = list(options.prompts)
    if options.prompts_file is not None:
        try:
            content = Path(options.prompts_file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataNotFoundError(
                "the file of prompts cannot be read",
                got=f"{options.prompts_file}: {error}",
                fix="name a UTF-8 file with one prompt in each line",
            ) from error
        prompts += content.splitlines()
    if not prompts or "" in options.stop:
        raise OperandError(
            "there is nothing to generate",
            got="no prompt" if not prompts else "an empty --stop, which every text has",
            fix="write a prompt after the model, and stop texts that are not empty",
        )
    return prompts


def _texts(options: Namespace, prompts: list[str]) -> Iterator[str]:
    """What is written, in parts."""
    # Here, because they import JAX: --help and wrong options do not wait for it.
    import jax

    from tessera.models.generation import Sampler
    from tessera.training.data.text_stream import TextStream
    from tessera.training.data.vocabulary import check_tokens
    from tessera.training.trained_model import mesh_of, open_trained

    mesh = mesh_of(options.mesh)
    trained = open_trained(options.model, options.module)
    rows: list[list[int]] = []
    for prompt in prompts:
        ids = trained.tokenizer.encode(prompt)
        size = trained.model.vocab_size
        check_tokens("the prompt", prompt, ids, trained.tokenizer, size)
        rows.append([*trained.prefix, *ids.tolist()])
    streams = [TextStream(trained.tokenizer, row, options.stop) for row in rows]
    sampler = Sampler(
        trained.model, trained.read(mesh), mesh, cache_dtype=options.cache_dtype
    )
    steps = sampler.stream(
        rows,
        options.max_tokens,
        jax.random.key(options.seed),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_tokens=trained.stop_tokens,
    )
    parts: list[list[str]] = [[] for _ in rows]
    for tokens in steps:
        for token, stream, part in zip(tokens.tolist(), streams, parts, strict=True):
            if token >= 0 and token not in trained.stop_tokens:
                part.append(stream.push(token))
        if len(rows) == 1:
            yield parts[0].pop() if parts[0] else ""
        if all(stream.is_ended for stream in streams):
            break
    for prompt, stream, part in zip(prompts, streams, parts, strict=True):
        text = "".join([*part, stream.finish()])
        line = {"prompt": prompt, "text": text}
        yield (text if len(rows) == 1 else json.dumps(line, ensure_ascii=False)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
