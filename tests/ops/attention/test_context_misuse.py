# SPDX-License-Identifier: Apache-2.0
"""What attention over spread sequences refuses."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tessera import op
from tessera.errors import (
    CollectiveError,
    HeadCountError,
    OperandError,
    ShardDivisibilityError,
)
from tests.ops.attention.spreading import P, mesh_of, operands, spread


def message_of(kind: type[Exception], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        op.context_attention(*args, **options)
    return str(caught.value)


def test_settings_that_contradict_each_other():
    q, k, v, _ = operands()
    given = message_of(OperandError, q, k, v, method="rings", causal=False, window=0)
    assert given == (
        "[T401] context_attention cannot do this\n"
        "  got: method 'rings'\n"
        "  got: window 0\n"
        "  got: a window with causal=False\n"
        "  fix: use one of 'zigzag', 'ring', 'all_to_all'\n"
        "  fix: use a window of 1 or more, or None\n"
        "  fix: leave one of them out\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_operands_that_do_not_fit():
    q, k, v, _ = operands()
    assert message_of(OperandError, q, k, v[:, :4]) == (
        "[T401] context_attention takes queries [B, S, H, K], and keys and values "
        "[B, S, G, K] whose G divides H\n"
        "  got: queries (2, 48, 8, 8), keys (2, 48, 4, 8), values (2, 4, 4, 8)\n"
        "  fix: give all three the same B, S and K\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )
    assert message_of(OperandError, q, k, v, segment_ids=np.zeros((2, 4), int)) == (
        "[T401] context_attention takes one segment id for each token\n"
        "  got: segment_ids (2, 4), queries (2, 48, 8, 8)\n"
        "  fix: pass segment_ids of shape (2, 48)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )
    half = q.astype(np.float16)
    assert message_of(OperandError, half, k, v) == (
        "[T401] context_attention takes operands of one floating-point dtype\n"
        "  got: queries float16, keys float32, values float32\n"
        "  fix: cast them to one dtype first\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_queries_whose_layout_nobody_sees_or_splits_otherwise():
    mesh, (q, k, v, _) = mesh_of(4), operands()
    assert message_of(CollectiveError, q, k, v) == (
        "[T206] context_attention does not know the layout of its queries\n"
        "  got: float32[2,48,8,8]\n"
        "  fix: call it inside @op.kernel, where every device has its own block, or "
        "give the queries a layout\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )
    rows = spread(q, mesh, "ring", P("dp"))
    assert message_of(CollectiveError, rows, k, v) == (
        "[T206] mesh axis 'cp' does not split the sequences of the queries alone\n"
        f"  got: shape (2, 48, 8, 8), layout {rows.sharding.spec}\n"
        "  fix: split dim 1 over 'cp', and leave dim 3 whole\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )


def test_heads_that_cannot_be_exchanged():
    mesh, given = mesh_of(8), operands(heads=6, kv_heads=3)
    placed = [spread(x, mesh, "ring", P(None, "cp")) for x in given[:3]]
    assert message_of(HeadCountError, *placed, method="all_to_all") == (
        "[T402] all-to-all attention cannot divide the heads over mesh axis 'cp'\n"
        "  got: 6 query heads and 3 key/value heads on each device, axis size 8\n"
        "  fix: use cp 6, or the ring, which divides no heads\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T402.html"
    )


def test_sequences_that_the_chunks_do_not_divide():
    with pytest.raises(ShardDivisibilityError) as caught:
        op.zigzag(jnp.zeros((2, 20)), 4)
    assert str(caught.value) == (
        "[T201] a sequence cannot be cut into the 8 chunks that 4 devices hold in "
        "zigzag order\n"
        "  got: 20 tokens: 20 / 8 leaves 4\n"
        "  fix: use a sequence of 16 or 24 tokens\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T201.html"
    )
