# SPDX-License-Identifier: Apache-2.0
"""Writes golden.json: what Hugging Face Transformers computes for ``golden_cases``.

``make test-hf`` runs it with --check in an environment of its own, where torch is;
--new adds the cases that the file lacks:

    python -m tests.train.models.golden.make_golden [--check | --new]
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.train.models.golden.golden_cases import CASES, summary, tokens, weight

PATH = Path(__file__).with_name("golden.json")


def published(
    case: str, name: str, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder that a parameter of Transformers 5 is made of."""
    is_split = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    if not is_split or case == "gpt_oss":
        return {name: shape}
    prefix, _, part = name.rpartition(".")
    experts, rows, columns = shape
    if part == "down_proj":
        return {
            f"{prefix}.{e}.down_proj.weight": (rows, columns) for e in range(experts)
        }
    return {
        f"{prefix}.{e}.{half}_proj.weight": (rows // 2, columns)
        for e in range(experts)
        for half in ("gate", "up")
    }


def joined(parts: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A parameter of Transformers 5 from the tensors of a folder."""
    return np.concatenate([x.reshape(-1) for x in parts.values()]).reshape(shape)


def compute(case: str) -> dict:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**CASES[case])
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in names.items():
            parts = {
                n: weight(case, n, s)
                for n, s in published(case, name, parameter.shape).items()
            }
            parameter.copy_(torch.from_numpy(joined(parts, tuple(parameter.shape))))
    ids = torch.from_numpy(tokens())
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).double(),
        ids[:, 1:].reshape(-1),
        reduction="sum",
    )
    loss.backward()
    gradients = {}
    for name, parameter in names.items():
        left = parameter.grad.numpy().reshape(-1)
        for part, shape in published(case, name, tuple(parameter.shape)).items():
            size = int(np.prod(shape))
            gradients[part], left = (
                summary(part, left[:size].reshape(shape)),
                left[size:],
            )
    return {
        "logits": np.round(logits[:, ::3].detach().numpy().astype(float), 7).tolist(),
        "loss": loss.item(),
        "gradients": gradients,
    }


def main() -> int:
    import torch
    import transformers

    known = json.loads(PATH.read_text())["cases"] if "--new" in sys.argv[1:] else {}
    made = {case: known.get(case) or compute(case) for case in CASES}
    if "--check" in sys.argv[1:]:
        golden = json.loads(PATH.read_text())["cases"]
        for name, numbers in made.items():
            np.testing.assert_allclose(
                numbers["logits"], golden[name]["logits"], rtol=1e-5, atol=1e-5
            )
            np.testing.assert_allclose(numbers["loss"], golden[name]["loss"], rtol=1e-6)
        sys.stdout.write(f"{len(made)} golden cases are what this machine computes\n")
        return 0
    with_versions = {
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "cases": made,
    }
    PATH.write_text(json.dumps(with_versions) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
