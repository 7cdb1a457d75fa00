# SPDX-License-Identifier: Apache-2.0
"""The three parts of ``training.mixed_precision``."""

import pytest

from tessera.errors import SettingValueError
from tessera.train.loop.precision import Precision, precision_of


@pytest.mark.parametrize(
    ("setting", "policy", "activations"),
    [
        ("f32", Precision(), None),
        ("bf16", Precision(computation="bfloat16"), "bfloat16"),
        ("fp16", Precision(computation="float16"), "float16"),
        ({"computation": "bf16"}, Precision(computation="bfloat16"), "bfloat16"),
        (
            {"computation": "bf16", "reduction": "bf16", "parameters": "f32"},
            Precision("float32", "bfloat16", "bfloat16"),
            "bfloat16",
        ),
        ("fp8", Precision(computation="bfloat16", fp8=True), "bfloat16"),
        (
            {"computation": "fp8", "reduction": "f32"},
            Precision(computation="bfloat16", fp8=True),
            "bfloat16",
        ),
    ],
)
def test_a_setting_names_a_policy(setting, policy, activations):
    assert precision_of(setting) == policy
    assert policy.activations == activations
    assert policy.reduces_narrow == (policy.reduction != "float32")


def test_gradients_are_not_reduced_in_a_third_dtype():
    with pytest.raises(SettingValueError) as caught:
        precision_of({"computation": "bf16", "reduction": "fp16"})
    assert caught.value.fix == "use reduction: f32, or computation: fp16"


@pytest.mark.parametrize("reduction", ["bf16", "fp8"])
def test_gradients_of_fp8_are_reduced_in_f32(reduction):
    with pytest.raises(SettingValueError):
        precision_of({"computation": "fp8", "reduction": reduction})
