# SPDX-License-Identifier: Apache-2.0
"""What ``ts.autocast`` is to compute, operation by operation, without nested programs.

``flat`` writes a program as one list of operations: calls are inlined and loops are
unrolled. ``reference`` decides by the documented rules which results are rounded, and
computes the operations one by one in f32, rounding explicitly. ``evaluate`` runs any
program one operation at a time, so that XLA combines and leaves out nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from tessera.foundations.primitive_properties import ARITHMETIC
from tessera.graph.narrowing.rules import CUSTOM_CALLS, PAIRWISE, RULES, Rule
from tessera.jax_compat import jaxprs

F32 = jnp.float32
COPY, INDEX, STACK = "copy", "index", "stack"


def evaluate(program, values):
    """The outputs of a program, each operation computed by itself."""
    nodes = flat(program, len(values))
    results = list(values)
    for node in nodes[len(values) :]:
        if node.results_of is None:
            results.append(compute(node, [results[i] for i in node.operands]))
        else:
            results.append(results[node.results_of][node.number])
    return [results[i] for i in nodes.outputs]


@dataclass
class Node:
    """One operation, or one of several results of the operation ``results_of``."""

    name: str
    operands: list[int] = field(default_factory=list)
    equation: Any = None
    scopes: str = ""
    value: Any = None
    number: int = 0
    results_of: int | None = None
    carry: int | None = None
    aval: Any = None

    @property
    def is_f32(self):
        return getattr(self.aval, "dtype", None) == F32


class Nodes(list):
    outputs: list[int]

    def add(self, *args, **kwargs):
        self.append(Node(*args, **kwargs))
        return len(self) - 1


def flat(program, count):
    nodes = Nodes()
    inputs = [nodes.add("input", aval=v.aval) for v in jaxprs.inputs(program)]
    assert len(inputs) == count
    nodes.outputs = inline(nodes, program, inputs, "")
    return nodes


def inline(nodes, program, inputs, scopes):
    env = dict(zip(jaxprs.inputs(program), inputs, strict=True))
    for variable, value in zip(
        jaxprs.constant_inputs(program), jaxprs.constants(program), strict=True
    ):
        env[variable] = nodes.add("constant", value=value, aval=variable.aval)

    def read(atom):
        if isinstance(atom, jaxprs.Literal):
            return nodes.add("literal", value=atom.val, aval=atom.aval)
        return env[atom]

    for equation in jaxprs.equations(program):
        path = f"{scopes}/{jaxprs.name_scopes(equation)}"
        operands, name = (
            [read(atom) for atom in equation.invars],
            equation.primitive.name,
        )
        if name == "scan":
            results = unroll(nodes, equation, operands, path)
        elif RULES.get(name) is Rule.INSIDE or name in CUSTOM_CALLS:
            (inner,) = jaxprs.inner_programs(equation)
            results = inline(nodes, inner, operands, path)
        else:
            results = plain(nodes, equation, operands, path)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxprs.outputs(program)]


def plain(nodes, equation, operands, path):
    name, variables = equation.primitive.name, equation.outvars
    if name in PAIRWISE:
        pairs = zip(operands, variables, strict=True)
        return [nodes.add(COPY, [i], aval=v.aval) for i, v in pairs]
    if not equation.primitive.multiple_results:
        aval = variables[0].aval
        return [nodes.add(name, operands, equation, path, aval=aval)]
    made = nodes.add(name, operands, equation, path)
    return [
        nodes.add(name, operands, equation, path, None, n, made, aval=v.aval)
        for n, v in enumerate(variables)
    ]


def unroll(nodes, equation, operands, path):
    (body,) = jaxprs.inner_programs(equation)
    consts, carries = jaxprs.scan_sizes(equation)
    length, is_reverse = equation.params["length"], equation.params["reverse"]
    variables = jaxprs.inputs(body)
    group = len(nodes)

    def carried(indices):
        avals = [v.aval for v in variables[consts : consts + carries]]
        return [
            nodes.add(COPY, [i], carry=group + n, aval=aval)
            for n, (i, aval) in enumerate(zip(indices, avals, strict=True))
        ]

    carry, stacks = carried(operands[consts : consts + carries]), []
    for step in range(length):
        number = length - 1 - step if is_reverse else step
        slices = [
            nodes.add(INDEX, [i], number=number, aval=v.aval)
            for i, v in zip(
                operands[consts + carries :], variables[consts + carries :], strict=True
            )
        ]
        results = inline(nodes, body, [*operands[:consts], *carry, *slices], path)
        carry = carried(results[:carries])
        stacks.append(results[carries:])
    ordered = stacks[::-1] if is_reverse else stacks
    stacked = [
        nodes.add(STACK, [each[n] for each in ordered], aval=v.aval)
        for n, v in enumerate(equation.outvars[carries:])
    ]
    return [*carry, *stacked]


def compute(node, operands):
    match node.name:
        case "literal" | "constant":
            return node.value
        case "copy":
            return operands[0]
        case "index":
            return operands[0][node.number]
        case "stack":
            return jnp.stack(operands)
    results = jaxprs.bind(node.equation, operands)
    return results if node.equation.primitive.multiple_results else results[0]


# --- the rules


@dataclass(frozen=True)
class Kind:
    """What a value is: ``narrow``, a ``number``, a ``vector``, or anything else."""

    name: str
    dtype: Any = None
    value: Any = None
    is_product: bool = False
    is_forward: bool = True


WIDE = Kind("wide")


def scope_dtype(scopes):
    words = scopes.replace("(", "/").replace(")", "/").split("/")
    found = [word.removeprefix("autocast_") for word in words if "autocast_" in word]
    return None if not found or found[-1] == "off" else jnp.dtype(found[-1])


def is_matmul(node, nodes):
    if RULES.get(node.name) is not Rule.MATMUL or scope_dtype(node.scopes) is None:
        return False
    return all(nodes[i].is_f32 for i in node.operands[:2])


def moves(node):
    return RULES.get(node.name) is Rule.MOVE or node.name in (COPY, INDEX, STACK)


def is_arithmetic(node):
    dtype, rule = scope_dtype(node.scopes), RULES.get(node.name)
    if rule is Rule.POWER:
        return dtype == jnp.bfloat16 and node.equation.params.get("y", 2) > 0
    return rule is Rule.NARROW and dtype is not None


def number_in(value, dtype):
    with np.errstate(all="ignore"):
        return np.float32(np.float32(value).astype(dtype))


def kind_of(node, nodes, kinds, wide_carries):
    if not node.is_f32 or node.carry in wide_carries:
        return WIDE
    if node.name == "literal" and np.ndim(node.value) == 0:
        return Kind("number", value=float(node.value))
    dtype, is_forward = scope_dtype(node.scopes), "transpose(" not in node.scopes
    if is_matmul(node, nodes):
        return Kind("narrow", dtype, None, True, is_forward)
    operands = [kinds[i] for i in node.operands if nodes[i].is_f32]
    arrays = [kind for kind in operands if kind.name != "number"]
    if moves(node):
        if node.carry is not None and not arrays:
            return WIDE
        return moved(node, nodes, operands, arrays)
    if operands and not arrays:
        if node.name == "convert_element_type":
            return operands[0]
        return Kind("number") if node.name in ARITHMETIC else WIDE
    if not is_arithmetic(node):
        return WIDE
    if node.name == "add" and any(kind.name == "vector" for kind in arrays):
        arrays = [kind for kind in arrays if kind.name != "vector"]
        if not arrays or not all(kind.is_product for kind in arrays):
            return WIDE
    if not all(kind.name == "narrow" and kind.dtype == dtype for kind in arrays):
        return WIDE
    return Kind("narrow", dtype, None, False, is_forward)


def moved(node, nodes, operands, arrays):
    if not arrays:
        return operands[0] if operands and len(set(operands)) == 1 else WIDE
    if len(operands) == 1 and arrays[0].name in ("wide", "vector"):
        sizes = [
            sum(size > 1 for size in aval.shape)
            for aval in (nodes[node.operands[0]].aval, node.aval)
        ]
        is_vector = arrays[0].name == "vector" or sizes[0] == 1
        if node.name in (COPY, INDEX, STACK):
            return arrays[0] if node.name == COPY else WIDE
        spreads = node.name == "broadcast_in_dim" or (
            node.name in ("reshape", "squeeze", "transpose", "rev", "expand_dims")
            and sizes[1] == 1
        )
        is_parameter = is_input(node.operands[0], nodes)
        return Kind("vector") if is_vector and spreads and is_parameter else WIDE
    dtype = arrays[0].dtype
    if not all(kind.name == "narrow" and kind.dtype == dtype for kind in arrays):
        return WIDE
    for kind in operands:
        if kind.name == "number":
            if kind.value is None:
                return WIDE
            rounded = number_in(kind.value, dtype)
            if np.isinf(rounded) or (rounded == 0) != (kind.value == 0):
                return WIDE
    return Kind(
        "narrow",
        dtype,
        None,
        all(kind.is_product for kind in arrays),
        all(kind.is_forward for kind in arrays),
    )


def is_input(index, nodes):
    """Whether a value is an input, at most moved."""
    node = nodes[index]
    if moves(node) and node.carry is None:
        return all(is_input(i, nodes) for i in node.operands if nodes[i].is_f32)
    return node.name == "input"


def all_kinds(nodes):
    """The kinds of all values; carries are narrow if they are in every iteration."""
    wide_carries = set()
    while True:
        kinds = []
        for node in nodes:
            kinds.append(kind_of(node, nodes, kinds, wide_carries))
        carried = [(n.carry, k) for n, k in zip(nodes, kinds, strict=True)]
        groups = {}
        for carry, kind in carried:
            if carry is not None:
                groups.setdefault(carry, []).append(kind)
        failed = {
            carry
            for carry, found in groups.items()
            if any(kind.name != "narrow" for kind in found)
            or len({kind.dtype for kind in found}) > 1
        }
        if failed <= wide_carries:
            return kinds
        wide_carries |= failed


def is_cast(node):
    """Whether it may be a cast by the user, and not one of a gradient."""
    return node.name == "convert_element_type" and "transpose(" not in node.scopes


def narrow_nodes(nodes, kinds):
    """Which values are rounded."""
    wanted, before = set(), None
    while before != len(wanted):
        before = len(wanted)
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            dtype, is_narrow = scope_dtype(node.scopes), kinds[index].name == "narrow"
            reads = []
            if is_matmul(node, nodes):
                reads = [i for i in node.operands[:2] if kinds[i].dtype == dtype]
            elif index in wanted and (moves(node) or is_arithmetic(node)):
                reads = [i for i in node.operands if kinds[i].name == "narrow"]
            elif (
                node.name == "convert_element_type" and "transpose(" not in node.scopes
            ):
                to = node.aval.dtype
                reads = [i for i in node.operands if kinds[i].dtype == to == dtype]
            elif "transpose(" in node.scopes and not (moves(node) and is_narrow):
                reads = [
                    i
                    for i in node.operands
                    if kinds[i].dtype == dtype is not None and kinds[i].is_forward
                ]
            wanted.update(i for i in reads if kinds[i].name == "narrow")
        for index, node in enumerate(nodes):  # the carries of a loop go together
            if index in wanted and node.carry is not None:
                wanted.update(
                    i for i, other in enumerate(nodes) if other.carry == node.carry
                )
    return wanted


def reference(program, values):
    """The outputs of a program in f32 with autocasts in it, as they are to be."""
    nodes = flat(program, len(values))
    kinds = all_kinds(nodes)
    wanted = narrow_nodes(nodes, kinds)
    results = list(values)

    def rounded(value, dtype):
        return jnp.asarray(value, F32).astype(dtype).astype(F32)

    for index, node in enumerate(nodes):
        if index < len(values):
            continue
        if node.results_of is not None:
            value = results[node.results_of][node.number]
        elif is_matmul(node, nodes):
            dtype = scope_dtype(node.scopes)
            operands = [results[i] for i in node.operands]
            operands[:2] = [x.astype(dtype) for x in operands[:2]]
            params = dict(node.equation.params, preferred_element_type=jnp.dtype(F32))
            (value,) = jaxprs.bind(node.equation, operands, params)
        else:
            value = compute(node, [results[i] for i in node.operands])
        if index in wanted:
            value = rounded(value, kinds[index].dtype)
        results.append(value)
    return [results[i] for i in nodes.outputs]
