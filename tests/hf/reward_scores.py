# SPDX-License-Identifier: Apache-2.0
"""Scores texts as TRL's GRPOTrainer does by a reward model; run where torch is.

python reward_scores.py FOLDER CLASS CONFIG.json < [[prompt, completion], …]

A random classifier is written to the folder, which has a tokenizer.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str, name: str, config: str) -> None:
    """Print the scores of a padded batch, and those of each text without padding."""
    import torch
    import transformers

    values = json.loads(Path(config).read_text(encoding="utf-8"))
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**values, num_labels=1)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="30KB")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token_id

    def text_of(prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return tokenizer.apply_chat_template(prompt + completion, tokenize=False)

    texts = [text_of(*pair) for pair in json.load(sys.stdin)]
    options = {"return_tensors": "pt", "add_special_tokens": False}
    padding = {"padding": True, "padding_side": "right"}
    with torch.no_grad():
        padded = model(**tokenizer(texts, **padding, **options)).logits[:, 0].tolist()
        model.config.pad_token_id = None
        alone = [
            model(**tokenizer(one, **options)).logits[0, 0].item() for one in texts
        ]
    is_cut = [tokenizer(one, **options).input_ids[0, -1].item() for one in texts]
    is_cut = [last == tokenizer.pad_token_id for last in is_cut]
    print(json.dumps({"padded": padded, "alone": alone, "is_cut": is_cut}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
