# SPDX-License-Identifier: Apache-2.0
"""Parses the text of a compiled XLA module into plain objects.

``compiled.as_text()`` is the only description of a compiled program that every JAX
offers on every platform. jaxlib parses it, but its Python objects show no instructions.
The syntax changes between releases, so this parser relies on what has been stable: one
instruction per line, ``name = shape opcode(operands), attribute=value, ...``.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tessera.analysis.source_lines import StackFrame

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # other dtypes end with theirs

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]|, ')
_COMMENT = re.compile(r"/\*index=\d+\*/")
# The attributes of a kernel of Pallas for TPUs, which have lines of their own.
_LINES = re.compile(r'\{\n((?:".*\n)+)\}')
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """An array's dtype, by XLA's name for it, and its dims on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes; dtypes under a byte are packed.

        Example:
          >>> Shape("bf16", (8, 64)).nbytes, Shape("s4", (3,)).nbytes
          (1024, 2)
        """
        return -(-_bits(self.dtype) * math.prod(self.dims) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    tail: str = field(repr=False)
    is_root: bool = False

    @property
    def is_tuple(self) -> bool:
        """Whether the result is a tuple."""
        return self.result.startswith("(")

    @cached_property
    def elements(self) -> tuple[tuple[Shape, ...], ...]:
        """The arrays of the result; one entry per element of its outermost tuple."""
        if not self.is_tuple:
            return (_shapes(self.result),)
        return tuple(_shapes(part) for part in _split(self.result[1:-1]))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return tuple(shape for element in self.elements for shape in element)

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """What follows the operands, by name, as text."""
        attributes: dict[str, str] = {}
        for part in _split(self.tail):
            name, _, value = part.partition("=")
            if name == "device_ids" and "replica_groups" in attributes:
                # The one attribute that is printed with a comma outside brackets.
                attributes["replica_groups"] += f", {part}"
            else:
                attributes[name] = value
        return attributes

    @cached_property
    def called(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the computations that this instruction runs, by attribute."""
        return {
            name: tuple(part.lstrip("%") for part in _split(value.strip("{}")))
            for name, value in self.attributes.items()
            if name in _CALLS
        }

    @property
    def op_name(self) -> str:
        """JAX's name stack of the operation, such as ``jit(step)/mul``, or ``""``."""
        return _unescaped(self._metadata(f"op_name={_QUOTED}"))

    def _metadata(self, pattern: str) -> str:
        match = re.search(pattern, self.attributes.get("metadata", ""))
        return match[1] if match else ""


@dataclass(frozen=True)
class Computation:
    """A function of the module: instructions by name, in program order."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        instructions = list(self.instructions.values())
        return next((i for i in instructions if i.is_root), instructions[-1])

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by their number."""
        return {
            int(instruction.operands[0]): instruction
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter"
        }

    @cached_property
    def _readers(self) -> Mapping[str, tuple[Instruction, ...]]:
        readers: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                readers.setdefault(operand, []).append(instruction)
        return {name: tuple(each) for name, each in readers.items()}

    def readers(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that read this one's result."""
        return self._readers.get(instruction.name, ())

    def sources(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions whose results this one reads."""
        known = self.instructions
        return tuple(known[name] for name in instruction.operands if name in known)

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """The arrays that an instruction reads, tuples flattened."""
        sources = self.sources(instruction)
        return tuple(shape for source in sources for shape in source.shapes)


@dataclass(frozen=True)
class Module:
    """A compiled program, which every device runs."""

    name: str
    computations: Mapping[str, Computation]
    entry: str
    num_devices: int
    tables: Mapping[str, Mapping[int, str]] = field(repr=False)

    def callees(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction runs, in the order of its attributes."""
        names = itertools.chain.from_iterable(instruction.called.values())
        return [self.computations[name] for name in names]

    def body(self, loop: Instruction) -> Computation:
        """The body of a ``while``."""
        return self.computations[loop.called["body"][0]]

    def frames(self, instruction: Instruction) -> tuple[StackFrame, ...]:
        """The Python stack of an instruction, innermost frame first; may be empty."""
        metadata = instruction._metadata
        if stack := metadata(r"stack_frame_id=(\d+)"):
            return tuple(self._stack(int(stack)))
        if file := metadata(f"source_file={_QUOTED}"):
            line = int(metadata(r"source_line=(\d+)") or 0)
            return (StackFrame(_unescaped(file), line),)
        return ()

    def _stack(self, frame: int) -> Iterator[StackFrame]:
        stack = self.tables["StackFrames"]
        # A parent comes before its child. A first frame that names a parent therefore
        # shows that this XLA prints the parent's number plus one, and one for "none".
        shift = 1 if _number(stack.get(1, ""), "parent_frame_id") else 0
        while frame in stack:
            yield self._location(_number(stack[frame], "file_location_id"))
            frame = _number(stack[frame], "parent_frame_id") - shift

    def _location(self, number: int) -> StackFrame:
        location = self.tables["FileLocations"].get(number, "")
        return StackFrame(
            self._name("FileNames", _number(location, "file_name_id")),
            _number(location, "line"),
            self._name("FunctionNames", _number(location, "function_name_id")),
        )

    def _name(self, table: str, number: int) -> str:
        match = re.match(_QUOTED, self.tables[table].get(number, ""))
        return _unescaped(match[1]) if match else ""


def parse(text: str) -> Module:
    """Parse the text of a compiled module.

    Args:
      text: What ``compiled.as_text()`` returns, on any platform.

    Raises:
      ValueError: The text contains no computation, so it is not a compiled module.

    Example:
      >>> module = parse('''HloModule double
      ... ENTRY main {
      ...   x = f32[8,64]{1,0} parameter(0)
      ...   ROOT y = f32[8,64]{1,0} add(x, x), metadata={op_name="jit(double)/add"}
      ... }''')
      >>> root = module.computations[module.entry].root
      >>> root.opcode, root.operands, str(root.shapes[0]), root.op_name
      ('add', ('x', 'x'), 'f32[8,64]', 'jit(double)/add')
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    header, entry, table = "", "", None
    current: dict[str, Instruction] | None = None
    text = _LINES.sub(lambda lines: f"{{{lines[1].replace(chr(10), '')}}}", text)
    for line in text.splitlines():
        if current is not None:
            if line.startswith("}"):
                current = None
            elif instruction := _instruction(line):
                for operand in instruction.operands:
                    _add_element(current, operand)
                current[instruction.name] = instruction
        elif line.startswith("HloModule"):
            header = header or line
        elif line in _TABLES:
            table = tables[line]
        elif start := _HEADER.match(line):
            current = {}
            computations[start[2]] = Computation(start[2], current)
            entry = start[2] if start[1] else entry
        elif table is not None and line[:1].isdigit():
            number, _, value = line.partition(" ")
            table[int(number)] = value
    if not computations:
        raise ValueError("the text has no computation: it is not a compiled module")
    return Module(
        name=header.removeprefix("HloModule ").partition(",")[0],
        computations=computations,
        entry=entry or next(reversed(computations)),
        num_devices=math.prod(
            _number(header, name) or 1 for name in ("num_partitions", "replica_count")
        ),
        tables=tables,
    )


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(_COMMENT.sub("", line))
    if not match:
        return None
    root, name, result, opcode, rest = match.groups()
    end = _closing(rest)
    # An operand may have its shape before it: 'f32[8]{0} %x'.
    operands = tuple(part.split(" ")[-1].lstrip("%") for part in _split(rest[:end]))
    if opcode == "constant":
        operands = (rest[:end],)
    return Instruction(name, opcode, result, operands, rest[end + 3 :], bool(root))


def _add_element(instructions: dict[str, Instruction], operand: str) -> None:
    """Add the instruction that an operand such as ``x#1`` of newer XLA stands for."""
    source, _, index = operand.partition("#")
    if index and source in instructions and operand not in instructions:
        part = _split(instructions[source].result[1:-1])[int(index)]
        instructions[operand] = Instruction(
            operand, "get-tuple-element", part, (source,), f"index={index}"
        )


def _closing(text: str) -> int:
    """Index of the parenthesis that closes one opened just before the text."""
    depth = 1
    for token in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return token.start()
    return len(text)


def _split(text: str) -> list[str]:
    """The parts between commas, where these are outside brackets and quotes."""
    parts: list[str] = []
    start = depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] == ", " and not depth:
            parts.append(text[start : token.start()])
            start = token.end()
        elif len(token[0]) == 1:
            depth += 1 if token[0] in "([{" else -1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        # A bounded dynamic dim is printed '<=8'.
        Shape(
            dtype, tuple(int(dim.lstrip("<=") or 0) for dim in dims.split(",") if dim)
        )
        for dtype, dims in _SHAPE.findall(text)
    )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s4, f8e4m3fn, c64
    return int(width[1]) if width else 8


def _unescaped(text: str) -> str:
    r"""The text that XLA printed between quotes, its escapes undone.

    Example:
      >>> _unescaped(r"/home/J\303\266rg/a \"b\".py")
      '/home/Jörg/a "b".py'
    """
    if "\\" not in text:
        return text
    # XLA escapes the bytes of UTF-8 one by one.
    escaped = text.encode().decode("unicode_escape")
    return escaped.encode("latin-1", "replace").decode(errors="replace")


def _number(text: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match[1]) if match else 0
