# SPDX-License-Identifier: Apache-2.0
"""Prints the tokens that TRL's DPOTrainer makes of preferences; see its caller.

Runs in the environment of ``make test-hf``. Reads lists of records, one for each
layout, as TRL takes one layout at a time.
"""

import json
import sys
from types import SimpleNamespace

from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer
from trl import DPOTrainer


def main(folder: str) -> None:
    """Print the prompt and both answers of each record."""
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None)
    found = []
    for records in json.load(sys.stdin):
        data = Dataset.from_list(records)
        made = DPOTrainer._prepare_dataset(trainer, data, tokenizer, args, "train")
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        found.append([[one[name] for name in names] for one in made])
    sys.stdout.write(json.dumps(found))


main(sys.argv[1])
