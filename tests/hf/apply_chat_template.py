# SPDX-License-Identifier: Apache-2.0
"""Writes conversations by a tokenizer's template; run where Transformers is.

python apply_chat_template.py FOLDER < RECORDS.json
"""

import json
import sys
from functools import partial


def main(folder: str) -> None:
    """Print the text, ids and mask of each record, or null."""
    import jinja2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    results = []
    for record in json.load(sys.stdin):
        arguments = record.get("chat_template_kwargs") or {}
        apply = partial(
            tokenizer.apply_chat_template,
            record["messages"],
            tools=record.get("tools"),
            **arguments,
        )
        try:
            encoded = apply(
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            text = apply(tokenize=False)
            prompt = apply(tokenize=False, add_generation_prompt=True)
            prompt_ids = apply(add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        except jinja2.TemplateError:
            results.append(None)
            continue
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special}
        answer = [i for i, is_answer in zip(ids, mask, strict=True) if is_answer]
        results.append(
            {
                **{"text": text, "prompt": prompt, "ids": ids, "mask": mask},
                **{"prompt_ids": prompt_ids, "eos": tokenizer.eos_token_id},
                "ends": [i for i in answer if i in special],
            }
        )
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
