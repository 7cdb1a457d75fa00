# SPDX-License-Identifier: Apache-2.0
"""Writes what a user brings: a Gemma 3 with random weights, a tokenizer, and texts.

python make_folder.py FOLDER: FOLDER/gemma and FOLDER/texts; run where torch is.
"""

import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 64,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 2048,
}
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}


def tokenizer_of(texts: Sequence[str]) -> Any:
    """A byte-pair encoding that is trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=[*SPECIAL.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def main(folder: Path) -> None:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="ignore") for path in sorted(library.glob("*.py"))]
    texts = texts[:100]
    (folder / "texts").mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::3]]
        (folder / "texts" / f"{number}.jsonl").write_text("".join(lines))
    tokenizer_of(texts).save_pretrained(folder / "gemma")
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = Gemma3TextConfig(**SIZES, **ids)
    Gemma3ForCausalLM(config).save_pretrained(folder / "gemma")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
