# SPDX-License-Identifier: Apache-2.0
"""Reward functions, good and bad, as a user's module has them."""

import os
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np


def number(completions, **columns):
    return [float(text) for text in completions]


def shaky(prompts, completions):
    """Later calls end before earlier ones."""
    time.sleep(0.02 * (prompts[0] == "0"))
    return [int(text) for text in completions]


def correct(prompts, completions, answer):
    return [float(text == one) for text, one in zip(completions, answer, strict=True)]


def trl(completions, answer, completion_ids, log_extra=None, **kwargs):
    """As those in TRL's documentation, of conversations."""
    assert set(kwargs) == {"prompts"}
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if a in c else 0.0 for c, a in zip(contents, answer, strict=True)]


async def judge(completions, **kwargs):
    import asyncio

    await asyncio.gather(*(asyncio.sleep(0.01) for _ in completions))
    return [len(text) for text in completions]


def near(completions, answer, tolerance=0.0):
    pairs = zip(completions, answer, strict=True)
    return [float(abs(float(a) - float(b)) <= tolerance) for a, b in pairs]


def judges_digits(completions):
    return [float(text) if text.isdigit() else None for text in completions]


VALUES = {
    "true": True,
    "int": np.int64(3),
    "float32": np.float32(0.5),
    "array": np.array(2.0),
    "fraction": Fraction(1, 4),
    "none": None,
    "nan": float("nan"),
    "inf": -np.inf,
    "huge": 1e300,
    "digits": "1",
    "nested": [1.0],
    "one": np.ones(1),
    "complex": 1j,
    "enormous": 10**400,
}


def values(completions):
    return [VALUES[text] for text in completions]


def array(completions):
    return np.array([float(text) for text in completions])


def generator(completions):
    return (float(text) for text in completions)


def as_set(completions):
    return {float(text) for text in completions}


def as_dict(completions):
    return dict.fromkeys(completions, 1.0)


def as_text(completions):
    return "1" * len(completions)


def short(completions):
    return [1.0 for text in completions if text != "skip"]


def writes(prompts, completions, answer):
    found = correct(prompts, completions, answer)
    completions.clear()
    answer[:] = [None] * len(answer)
    return found


def acts(completions):
    """What a completion says happens."""
    actions = {
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit(0),
        "end": lambda: os._exit(0),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: time.sleep(600),
        "memory": lambda: bytearray(2**36),
        "print": lambda: sys.stdout.write("x" * 2**22),
        "input": lambda: subprocess.run(["cat"], check=True),
    }
    for text in completions:
        actions.get(text, int)()
    return [1.0 for _ in completions]


def late(completions):
    """The first call of a process takes too long, and then returns."""
    if "slow" in completions:
        time.sleep(1.5)
        return [-1.0 for _ in completions]
    return [1.0 for _ in completions]


def surroundings(completions):
    """Whether the process has JAX, the terminal's session or an accelerator."""
    return [
        "jax" in sys.modules,
        os.getsid(0) == os.getsid(os.getppid()),
        os.environ["JAX_PLATFORMS"] != "cpu",
    ]


def process(completions):
    return [os.getpid() for _ in completions]


no_function = 3
