# SPDX-License-Identifier: Apache-2.0
"""Requests of lm-evaluation-harness, and what its ``hf`` model answers.

python harness_requests.py FOLDER MAX_LENGTH
"""

import json
import sys
from typing import Any

LONG = "the hello all of 😀 it " * 6
PAIRS = [
    ("", "hello"),
    ("hello", " all"),
    ("a context that ends in spaces  ", "hello"),
    ("he", "llo"),  # the tokens of both do not meet at the boundary
    (LONG, "all"),
    ("why", LONG[:24]),
    ("<bos>hello", " all"),  # as a chat template writes it
    ("x", "y"),
    ("a" * 33, "b"),
]
TEXTS = ["hello", LONG, "x", "a" * 32, "a" * 33, LONG * 3]
GENERATION = {"do_sample": False, "max_gen_toks": 12}
CONTEXTS = [
    ("hello", {**GENERATION, "until": []}),
    (LONG, {**GENERATION, "until": []}),
    ("why hello", {**GENERATION, "until": ["e", "\n\n"]}),
    ("x", {**GENERATION, "until": ["e", "\n\n"]}),
]


def results(model: Any) -> dict[str, Any]:
    """What a model of the harness answers, as JSON has it."""
    from lm_eval.api.instance import Instance

    def requests(kind: str, arguments: list[Any]) -> list[Instance]:
        return [
            Instance(kind, {}, one if isinstance(one, tuple) else (one,), number)
            for number, one in enumerate(arguments)
        ]

    made = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": TEXTS,
        "generate_until": CONTEXTS,
    }
    answers = {k: getattr(model, k)(requests(k, made[k])) for k in made}
    return json.loads(json.dumps(answers))


def main(folder: str, max_length: str) -> None:
    """Print the answers."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)
    model = HFLM(
        pretrained=folder,
        device="cpu",
        dtype="float32",
        batch_size=3,
        max_length=int(max_length),
    )
    print(json.dumps(results(model)))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
