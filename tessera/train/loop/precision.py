# SPDX-License-Identifier: Apache-2.0
"""``training.mixed_precision``: the dtypes of a step, as a policy of three parts.

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740; the parts are
those of JMP and of PyTorch's FSDP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tessera.errors import SettingValueError, did_you_mean

_PARTS: Final = ("parameters", "computation", "reduction")
_NUMPY_NAMES: Final = {"f32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FP8: Final = "fp8"


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, by NumPy's names.

    Attributes:
      parameters: Of the stored parameters, float32, as is the optimizer's state.
      computation: Of activations, of what the backward pass keeps, and of parameters
        where they are used: sums inside of matmuls, norms, softmax, routers and the
        loss are float32.
      reduction: Of the gradients that devices add up. Where it is not float32, all
        parameters are cast before the loss is computed, as FSDP casts them; the rows
        of an embedding and microbatches are added up in float32 all the same.
      fp8: Whether the projections of blocks multiply 8-bit operands; activations are
        bfloat16 then.
    """

    parameters: str = "float32"
    computation: str = "float32"
    reduction: str = "float32"
    fp8: bool = False

    @property
    def reduces_narrow(self) -> bool:
        """Whether devices add up gradients that are not float32."""
        return self.reduction != "float32"

    @property
    def activations(self) -> str | None:
        """Dtype to which parameters are cast where they are used, if to another."""
        return None if self.computation == self.parameters else self.computation


def precision_of(setting: Any) -> Precision:
    """The policy that ``training.mixed_precision`` names.

    Args:
      setting: ``f32``, ``bf16``, ``fp16`` or ``fp8``, the dtype of computation; or a
        mapping with some of the parts.

    Raises:
      SettingValueError: [T502] there is no such part or dtype.

    Example:
      >>> precision_of("bf16").computation, precision_of("bf16").reduction
      ('bfloat16', 'float32')
    """
    parts = setting if isinstance(setting, Mapping) else {"computation": setting}
    allowed = {
        "parameters": ("f32",),
        "computation": (*_NUMPY_NAMES, _FP8),
        "reduction": tuple(_NUMPY_NAMES),
    }
    for name, value in parts.items():
        _check(name, _PARTS, setting)
        _check(value, allowed[name], setting)
    fp8 = parts.get("computation") == _FP8
    names = _NUMPY_NAMES | {_FP8: "bfloat16"}
    policy = Precision(**{part: names[parts[part]] for part in parts}, fp8=fp8)
    own = "float32" if fp8 else policy.computation
    if policy.reduction not in ("float32", own):
        raise SettingValueError(
            "gradients are reduced in f32 or in the dtype of computation",
            got=f"training.mixed_precision={setting}",
            fix=f"use reduction: f32, or computation: {parts['reduction']}",
        )
    return policy


def _check(name: Any, names: tuple[str, ...], setting: Any) -> None:
    if name not in names:
        raise SettingValueError(
            "training.mixed_precision does not take this value",
            got=f"training.mixed_precision={setting}",
            fix=did_you_mean(str(name), names),
        )
