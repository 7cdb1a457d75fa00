# SPDX-License-Identifier: Apache-2.0
"""Loads and makes folders with Transformers; run where torch is.

python transformers_models.py load FOLDER TOKENS.npy LOGITS.npy
python transformers_models.py save FOLDER TOKENS.npy LOGITS.npy CLASS CONFIG.json DTYPE
python transformers_models.py peft FOLDER TOKENS.npy LOGITS.npy ADAPTERS
"""

import json
import sys
from pathlib import Path
from typing import Any


def save(folder: str, name: str, config: str, dtype: str) -> Any:
    """A model with random weights, which is written to several files."""
    import torch
    import transformers

    values = json.loads(Path(config).read_text(encoding="utf-8"))
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**values)).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="30KB")
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32), {}


def load(folder: str) -> Any:
    """The model of a folder, and what was loaded."""
    import torch
    import transformers

    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    problems = {name: sorted(map(str, found)) for name, found in loaded.items()}
    what = {
        "class": type(model).__name__,
        "problems": {name: found for name, found in problems.items() if found},
        "dtype": str(transformers.AutoConfig.from_pretrained(folder).dtype),
        "eos": model.generation_config.eos_token_id,
    }
    if Path(folder, "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        what["ids"] = tokenizer("ab ba", add_special_tokens=False)["input_ids"]
    return model, what


def peft(folder: str, adapters: str) -> Any:
    """A folder with adapters of PEFT, and what PEFT warned of."""
    import warnings

    from peft import PeftModel

    model, what = load(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, adapters)
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    caught = [one for one in caught if issubclass(one.category, UserWarning)]
    told = {"warnings": [str(one.message) for one in caught], "adapters": len(names)}
    return adapted, what | told


def main(mode: str, folder: str, tokens: str, logits: str, *rest: str) -> None:
    """Write the logits, and print what was loaded."""
    import numpy as np
    import torch

    model, what = {"save": save, "load": load, "peft": peft}[mode](folder, *rest)
    model.eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(np.load(tokens)).long()).logits
    np.save(logits, scores.numpy())
    sys.stdout.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
