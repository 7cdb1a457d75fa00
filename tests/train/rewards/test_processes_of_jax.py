# SPDX-License-Identifier: Apache-2.0
"""Two processes of JAX score a share each, and have all rewards, to the last bit."""

import numpy as np
import pytest

from tests.two_processes import found_by_two

PROGRAM = """
from tessera.train.rewards import Rewards

texts = [str(i / 3) for i in range(70)]
texts[20] = "x"
with Rewards(["tests.train.rewards.functions:number", "exact"], [1, 0.1],
             columns=["answer"], processes=2) as rewards:
    found = rewards.score(texts, texts, {"answer": texts})
print("FOUND", json.dumps([found.total.tolist(), found.by_name.tolist(), found.notes]))
"""


@pytest.mark.slow(reason="it starts two processes of JAX")
def test_all_processes_have_the_same_rewards_in_the_same_order():
    one, other = found_by_two(PROGRAM)
    np.testing.assert_equal(one, other)
    expected = [i / 3 for i in range(70)]
    expected[20] = np.nan
    np.testing.assert_array_equal(np.array(one[1])[:, 0], expected)
    np.testing.assert_array_equal(np.array(one[1])[:, 1], 1)
    (note,) = one[2]
    assert "raised ValueError" in note
    assert note.endswith("missing for 1 of 70")
