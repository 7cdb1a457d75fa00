# SPDX-License-Identifier: Apache-2.0
"""Continues prompts with the model of a run, or of a folder of Hugging Face.

tessera generate outputs/mine "def main(" --max-tokens=100 --temperature=0.8
tessera generate folder "One." "Two." --mesh='[[1,4],[fsdp,tp]]'
tessera generate folder --chat --system="Be brief." "Who are you?"

The text of one prompt is written as it is generated. Of several prompts, each is a line
of JSON with its prompt and its text, in the order of the prompts.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.errors import DataNotFoundError, OperandError
from tessera.train.commands.command_parser import CommandParser
from tessera.train.commands.output_file import DTYPE_NAMES
from tessera.train.runtime.exit_codes import shows_errors

if TYPE_CHECKING:
    from tessera.train.data.chat_template import Conversation


@shows_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Generate what the command line asks for; the exit code."""
    # Options may stand between the model and the prompts.
    options = _parser().parse_intermixed_args(arguments)
    for text in _texts(options):
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0


def _parser() -> ArgumentParser:
    parser = CommandParser("tessera generate", __doc__)
    add = parser.add_argument
    add("model", help="a run, its checkpoints, one of them, or a folder")
    add("--module", action="append", default=[], help="imported first; repeatable")
    add("--mesh", help="sizes and axes, such as [[1,4],[fsdp,tp]]; one device")
    add("prompts", nargs="*", metavar="prompt", help="several make a batch")
    add("--prompts-file", help="a file with one prompt in each line")
    add("--chat", action="store_true", help="answer prompts by the chat template")
    add("--system", help="with --chat, a message before each prompt")
    add("--messages-file", help="with --chat, conversations as lines of JSON")
    add("--max-tokens", type=int, default=128, help="the most that are added; 128")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    add("--top-k", type=int, help="sample from the k likeliest tokens")
    add("--top-p", type=float, help="sample from those with this probability together")
    add("--seed", type=int, default=0, help="of the samples; 0")
    add("--stop", action="append", default=[], help="end before this text; repeatable")
    add("--cache-dtype", choices=DTYPE_NAMES, help="of keys and values")
    return parser


def _prompts(options: Namespace) -> list[str]:
    prompts = list(options.prompts)
    if options.prompts_file is not None:
        prompts += _lines(options.prompts_file)
    of_chats = options.system, options.messages_file
    mistakes = {
        "no prompt": not prompts and options.messages_file is None,
        "an empty --stop, which every text has": "" in options.stop,
        "--system or --messages-file without --chat": not options.chat
        and of_chats != (None, None),
    }
    if got := [mistake for mistake, is_made in mistakes.items() if is_made]:
        raise OperandError(
            "there is nothing to generate",
            got="\n".join(got),
            fix="write a prompt after the model, and stop texts that are not empty; "
            "use --chat for conversations",
        )
    return prompts


def _lines(path: str) -> list[str]:
    """The prompts of a file, one in each line."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataNotFoundError(
            "the file of prompts cannot be read",
            got=f"{path}: {error}",
            fix="name a UTF-8 file with one prompt in each line",
        ) from error
    # Not splitlines, which also ends lines at U+2028 and the like.
    lines = content.removesuffix("\n").split("\n") if content else []
    if blank := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise OperandError(
            "a line of the file of prompts is blank",
            got=f"{path}: line {', '.join(map(str, blank[:8]))}",
            fix="remove it, or write a prompt there",
        )
    return lines


def _conversations(
    options: Namespace, prompts: list[str]
) -> "Iterator[tuple[Any, Conversation]]":
    """Each prompt or its messages, and the conversation that is to be answered."""
    from tessera.train.data.chat_template import Conversation
    from tessera.train.data.data_config import DataConfig
    from tessera.train.data.files import list_files
    from tessera.train.data.records import read_records

    system = [{"role": "system", "content": options.system}] if options.system else []
    for prompt in prompts:
        yield prompt, Conversation([*system, {"role": "user", "content": prompt}])
    if (path := options.messages_file) is not None:
        config = DataConfig(name="text", path=path, messages_key="messages")
        ignored = set[str]()
        for unit in list_files(path, "jsonl"):
            for record in read_records(unit, config, ignored):
                chat = record.conversation
                assert chat is not None
                messages = [*system, *chat.messages]
                yield chat.messages, chat._replace(messages=messages)
        if ignored:
            keys = ", ".join(sorted(ignored))
            sys.stderr.write(f"not used: keys of the conversations: {keys}\n")


def _texts(options: Namespace) -> Iterator[str]:
    """What is written, in parts."""
    prompts: list[Any] = _prompts(options)
    # Here, because it imports JAX: --help and wrong options do not wait for it.
    import jax

    from tessera.train.data.text_stream import TextStream, stream_texts
    from tessera.train.loop.trained_model import mesh_of, open_trained
    from tessera.train.rollouts.sampler import Sampler

    mesh = mesh_of(options.mesh)
    trained = open_trained(options.model, options.module)
    if options.chat:
        conversations = [*_conversations(options, prompts)]
        prompts = [prompt for prompt, _ in conversations]
        chats = [chat for _, chat in conversations]
        rows, stops = (
            [*map(trained.encode_chat, chats)],
            trained.chat_stop_tokens(chats),
        )
    else:
        rows, stops = [*map(trained.encode, prompts)], trained.stop_tokens
    streams = [TextStream(trained.tokenizer, row, options.stop) for row in rows]
    sampler = Sampler(
        trained.model,
        mesh,
        num_tokens=options.max_tokens,
        max_length=max(map(len, rows)) + options.max_tokens,
        slots=min(len(rows), 64),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_tokens=stops,
        cache_dtype=options.cache_dtype,
        dispatch_tokens=4 if len(rows) == 1 else 32,  # text appears as it is written
    )
    tokens = sampler.stream(
        trained.read(mesh),
        rows,
        jax.random.key(options.seed),
        is_ended=lambda row: streams[row].is_ended,
    )
    texts = [""] * len(rows)
    for row, text in stream_texts(tokens, streams, stops):
        if len(rows) == 1:
            yield text
        texts[row] += text
    if len(rows) == 1:
        yield "\n"
        return
    for prompt, text in zip(prompts, texts, strict=True):
        line = {"prompt": prompt, "text": text}
        yield json.dumps(line, ensure_ascii=False) + "\n"
