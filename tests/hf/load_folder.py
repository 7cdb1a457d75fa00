# SPDX-License-Identifier: Apache-2.0
"""Loads a folder with Transformers and prints its logits; run where torch is.

python load_folder.py FOLDER TOKENS.npy LOGITS.npy
"""

import json
import sys


def main(folder: str, tokens: str, logits: str) -> None:
    """Write the logits, and print what was loaded."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model.eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(np.load(tokens)).long()).logits
    np.save(logits, scores.numpy())
    problems = {name: sorted(map(str, found)) for name, found in loaded.items()}
    what = {
        "class": type(model).__name__,
        "problems": {name: found for name, found in problems.items() if found},
        "dtype": str(AutoConfig.from_pretrained(folder).dtype),
        "eos": GenerationConfig.from_pretrained(folder).eos_token_id,
    }
    sys.stdout.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
