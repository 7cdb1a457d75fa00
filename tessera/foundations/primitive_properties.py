# SPDX-License-Identifier: Apache-2.0
"""The properties of JAX primitives: which are elementwise, matmuls, views, calls, ...

Analyses and passes decide by a primitive's name. Every name is in at most one
group, and a property is a union of groups, so that two analyses agree on what a
primitive does. A primitive in no group is unknown: every user assumes that it may do
anything.
"""

from typing import Final


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# --- groups: each primitive is in at most one

ARITHMETIC: Final = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz conj
    cos cosh div eq erf erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
    log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or
    population_count pow real rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor
""")
"""One or a few instructions for each element; operands and results have one shape."""

SPECIAL_FUNCTIONS: Final = _names("""
    bessel_i0e bessel_i1e digamma erf_inv igamma igammac lgamma polygamma
    regularized_incomplete_beta zeta
""")
"""A loop or a long polynomial for each element, otherwise as ``ARITHMETIC``."""

COPIES: Final = _names("""
    copy copy_p name optimization_barrier pcast pvary stop_gradient
""")
"""Result i is operand i, marked for the compiler, a transformation or a type."""

PLACEMENTS: Final = _names("""
    device_put layout_constraint mesh_cast reshard sharding_constraint
""")
"""Result i is operand i, in another layout or memory."""

CASTS: Final = _names("convert_element_type reduce_precision")
"""The operand, rounded to another dtype or precision."""

RESHAPES: Final = _names("expand_dims reshape rev squeeze transpose")
"""The elements of the operand in another shape or order."""

BROADCASTS: Final = _names("broadcast_in_dim")
"""The elements of the operand, each several times."""

SLICES: Final = _names("""
    concatenate dynamic_slice dynamic_update_slice pad slice split stack unstack
""")
"""Contiguous parts of arrays taken out, put in or joined."""

REDUCTIONS: Final = _names("""
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum reduce_xor
""")
"""Results of all elements along some dims, which the results no longer have."""

CUMULATIVE: Final = _names("cumlogsumexp cummax cummin cumprod cumsum")
"""Results of all elements before each one along a dim."""

SORTS: Final = _names("sort top_k")
"""Orderings along one dim."""

MATMULS: Final = _names("dot_general ragged_dot_general")
"""Matrix products, ragged ones (of experts) among them."""

CONVOLUTIONS: Final = _names("conv_general_dilated")
"""Convolutions."""

CUDNN_ATTENTION: Final = _names("""
    dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper
""")
"""Attention by cuDNN, and its gradient."""

KERNELS: Final = _names("ffi_call pallas_call") | CUDNN_ATTENTION
"""Opaque to XLA, and assumed to be expensive."""

CALLS: Final = _names("""
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr eval_jaxpr jit pjit remat remat2
""")
"""Calls of one inner program with the equation's own operands and results."""

DEVICE_SUMS: Final = _names("""
    psum psum2 psum_invariant psum_scatter reduce_scatter unreduced_psum
    unreduced_reduce_scatter
""")
"""Sums over the devices of mesh axes."""

OTHER_COLLECTIVES: Final = _names("""
    all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmin
    ppermute
""")
"""Other exchanges between the devices of mesh axes."""

SOURCES: Final = _names("""
    axis_index create_token empty empty2 iota num_programs program_id random_seed
    random_unwrap random_wrap
""")
"""Numbers that no array operand decides, and views of random keys."""

HOST_CALLBACKS: Final = _names("debug_callback debug_print io_callback pure_callback")
"""Calls of Python functions at run time."""

# --- properties: unions of groups

ELEMENTWISE: Final = ARITHMETIC | SPECIAL_FUNCTIONS
"""Each element of a result is computed from the elements there of the operands."""

VIEWS: Final = COPIES | PLACEMENTS | CASTS | RESHAPES
"""Result i has the elements of operand i; a gradient by one is one by the other."""

CONTRACTIONS: Final = MATMULS | CONVOLUTIONS
"""Where nearly all floating-point operations of a training step are."""

EXPENSIVE: Final = CONTRACTIONS | KERNELS
"""Primitives whose results a backward pass stores instead of recomputing them."""

DATA_MOVEMENT: Final = (
    COPIES
    | PLACEMENTS
    | CASTS
    | RESHAPES
    | BROADCASTS
    | SLICES
    | DEVICE_SUMS
    | OTHER_COLLECTIVES
    | SOURCES
    | HOST_CALLBACKS
    | _names("bitcast_convert_type gather get swap")
)
"""What moves, converts or names data and counts as no floating-point operation."""

LINEAR: Final = (
    RESHAPES
    | BROADCASTS
    | _names("""
        add add_any concatenate convert_element_type copy copy_p div dot_general
        dynamic_slice gather mul neg reduce_sum select_n slice stack sub
    """)
)
"""Linear in an operand, where the other operands and the parameters allow it.

``mul`` is linear in each of its operands and not in both together: users check that
themselves.
"""

SIZE_PRESERVING: Final = (
    ELEMENTWISE
    | COPIES
    | PLACEMENTS
    | CASTS
    | (REDUCTIONS - {"reduce"})
    | _names("dot_general dynamic_slice slice squeeze stack transpose unstack")
)
"""Every dim of a result is a dim of the operands: where the batch dim has the same size
in both, row i of the result comes from row i of the operands."""
