# SPDX-License-Identifier: Apache-2.0
"""Checks calls against array annotations such as ``ts.Tensor["B", "S", ts.int32]``.

Dims are written as in jaxtyping, whose own annotations work too: ``Float[Array,
"B S"]`` is like ``ts.Tensor["B", "S"]``. To find out how the dims of a function are
related:

    annotations_of(attention)["w_qkv"].dims[1].symbols  # ("D_head", "H")
"""

from tessera.annotations.binding import Binding as Binding
from tessera.annotations.binding import bind as bind
from tessera.annotations.binding import check_call as check_call
from tessera.annotations.calls import bind_call as bind_call
from tessera.annotations.calls import refuse_options as refuse_options
from tessera.annotations.dims import Dim as Dim
from tessera.annotations.hints import annotations_of as annotations_of
from tessera.annotations.hints import hints_of as hints_of
from tessera.annotations.signatures import argument_names as argument_names
from tessera.annotations.signatures import own_signature as own_signature
from tessera.annotations.signatures import signature_of as signature_of
from tessera.annotations.tensor import Annotation as Annotation
from tessera.annotations.tensor import Tensor as Tensor
