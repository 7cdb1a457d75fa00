# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's trainers on pairs of texts; run where torch and trl are.

python trl_steps.py make FOLDER
python trl_steps.py dpo|orpo FOLDER PAIRS.jsonl SETTINGS.json OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}


def make(folder: str) -> None:
    """A Qwen 3 with random weights, and a tokenizer of bytes that begins with <bos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def train(loss: str, folder: str, pairs: str, settings: str, out: str) -> None:
    """Train on the pairs in their order.

    Writes OUT/losses.npy, one of each step, and two folders of the model: OUT/weights
    when it is trained, and OUT/gradients, the first gradients in place of the weights.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    Config: Any = {"dpo": DPOConfig, "orpo": ORPOConfig}[loss]
    Trainer: Any = {"dpo": DPOTrainer, "orpo": ORPOTrainer}[loss]
    losses: list[float] = []

    class Observed(Trainer):
        def compute_loss(self, *args: Any, **settings: Any) -> Any:
            value = super().compute_loss(*args, **settings)
            losses.append(value.item())
            return value

        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            """Of ORPO alone: its NLL is that of the prompt, too; the paper's is not."""
            chosen, *others, _ = super().concatenated_forward(model, batch)
            tokens = (batch["chosen_labels"] != -100).sum(1)
            return chosen, *others, -(chosen * tokens).sum() / tokens.sum()

    class FirstGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            if len(losses) == 1:
                named = model.named_parameters()
                gradients = {name: parameter.grad for name, parameter in named}
                model.save_pretrained(Path(out, "gradients"), state_dict=gradients)

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()

    records = Path(pairs).read_text(encoding="utf-8").splitlines()
    args = Config(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **json.loads(Path(settings).read_text(encoding="utf-8")),
    )
    model = load()
    trainer = Observed(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([json.loads(record) for record in records]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[FirstGradients()],
        **({"ref_model": load()} if loss == "dpo" else {}),
    )
    trainer.train()
    model.save_pretrained(Path(out, "weights"))
    np.save(Path(out, "losses.npy"), losses)


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "make":
        make(*rest)
    else:
        train(mode, *rest)
