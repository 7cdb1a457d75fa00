# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from tessera.analysis import hlo
from tessera.analysis.hlo import Shape
from tessera.analysis.source_lines import StackFrame

# What was compiled elsewhere has the lines of elsewhere.
pytestmark = pytest.mark.usefixtures("compiled_here")

# A GPU program of several syntaxes: comments in long tuples, tiled layouts of a TPU,
# operands with their shapes, an element of a tuple by '#', stack frames.
MODULE = """\
HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=4

FileNames
1 "/home/me/train.py"
2 "/venv/site-packages/jax/lax.py"

FunctionNames
1 "<module>"
2 "step"
3 "dot"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=1 end_column=9}
2 {file_name_id=1 function_name_id=2 line=12 end_line=12 column=4 end_column=9}
3 {file_name_id=2 function_name_id=3 line=99 end_line=99 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%pair (p: f32[8,16]) -> (f32[8,16], bf16[4]) {
  %p = f32[8,16]{1,0} parameter(0)
  %k = bf16[4]{0} constant({1, 2, 3, 4})
  ROOT %t = (f32[8,16]{1,0}, /*index=1*/bf16[4]{0}) tuple(%p, /*index=1*/%k)
}, execution_thread="main"

ENTRY %main.3_spmd (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0:T(8,128)S(1)} parameter(0), sharding={devices=[4,1]<=[4]}
  %call.1 = (f32[8,16]{1,0:T(8,128)}, bf16[4]{0:T(256)(2,1)}) \
call(f32[8,16]{1,0} %x), to_apply=%pair
  ROOT %all-reduce.2 = f32[8,16]{1,0} all-reduce(%call.1#0), channel_id=1, \
replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}, to_apply=%add, \
metadata={op_name="jit(step)/dot_general, with {odd} text" stack_frame_id=3}, \
backend_config={"a":{"b":[1, 2]}}
}
"""


@pytest.fixture
def module():
    return hlo.parse(MODULE)


def test_a_module_has_its_computations_and_its_device_count(module):
    assert module.name == "jit_step"
    assert list(module.computations) == ["add", "pair", "main.3_spmd"]
    assert module.entry == "main.3_spmd"
    assert module.num_devices == 4


def test_an_instruction_has_opcode_operands_shapes_and_root(module):
    main = module.computations["main.3_spmd"]
    call = main.instructions["call.1"]
    assert call.opcode == "call"
    assert call.operands == ("x",)
    assert call.called == {"to_apply": ("pair",)}
    assert call.elements == ((Shape("f32", (8, 16)),), (Shape("bf16", (4,)),))
    assert not call.is_root
    assert main.root.name == "all-reduce.2"


def test_comments_inside_tuples_are_not_operands(module):
    assert module.computations["pair"].root.operands == ("p", "k")


def test_an_operand_may_be_one_element_of_a_tuple(module):
    main = module.computations[module.entry]
    assert main.operand_shapes(main.root) == (Shape("f32", (8, 16)),)
    (element,) = main.sources(main.root)
    assert element.opcode == "get-tuple-element"
    assert element.attributes["index"] == "0"
    assert [i.name for i in main.sources(element)] == ["call.1"]
    assert main.readers(main.instructions["call.1"]) == (element,)
    assert [i.name for i in main.readers(element)] == ["all-reduce.2"]


def test_attributes_keep_their_commas(module):
    root = module.computations[module.entry].root
    assert root.attributes["replica_groups"] == (
        "mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}"
    )
    assert root.attributes["backend_config"] == '{"a":{"b":[1, 2]}}'
    assert root.op_name == "jit(step)/dot_general, with {odd} text"


def test_attributes_on_lines_of_their_own_belong_to_their_instruction():
    module = hlo.parse("""HloModule m

ENTRY main {
  x = f32[8]{0} parameter(0)
  y = f32[8]{0} custom-call(x), frontend_attributes={kernel_metadata={
"first":"{\\"block_q\\": 512}",
"second":"2"
}}, metadata={op_name="jit(step)/attend"}
  ROOT z = f32[8]{0} negate(y)
}
""")
    entry = module.computations[module.entry]
    assert list(entry.instructions) == ["x", "y", "z"]
    assert entry.root.operands == ("y",)
    assert entry.instructions["y"].op_name == "jit(step)/attend"


def test_stack_frames_come_innermost_first(module):
    root = module.computations[module.entry].root
    assert module.frames(root) == (
        StackFrame("/venv/site-packages/jax/lax.py", 99, "dot"),
        StackFrame("/home/me/train.py", 12, "step"),
        StackFrame("/home/me/train.py", 40, "<module>"),
    )


def test_stack_frames_with_parents_counted_from_zero_are_the_same(module):
    text = MODULE
    for parent in (1, 2, 3):
        text = text.replace(
            f"parent_frame_id={parent}}}", f"parent_frame_id={parent - 1}}}"
        )
    text = text.replace(" parent_frame_id=0}", "}")
    again = hlo.parse(text)
    root = module.computations[module.entry].root
    assert again.frames(again.computations[again.entry].root) == module.frames(root)


def test_a_source_line_may_stand_in_the_metadata_itself():
    text = """HloModule m
ENTRY main {
  ROOT x = f32[] constant(1), metadata={op_type="c" source_file="a/b.py" source_line=7}
}"""
    module = hlo.parse(text)
    root = module.computations["main"].root
    assert module.frames(root) == (StackFrame("a/b.py", 7),)
    assert root.operands == ("1",)


def test_names_with_spaces_quotes_and_letters_of_any_language_are_as_they_were():
    table = MODULE.replace("/home/me/train.py", r"/home/J\303\266rg x/a \"b\".py")
    text = table.replace("with {odd} text", r"\303\251tape \"a\"")
    module = hlo.parse(text)
    root = module.computations[module.entry].root
    assert module.frames(root)[1] == StackFrame('/home/Jörg x/a "b".py', 12, "step")
    assert root.op_name == 'jit(step)/dot_general, étape "a"'
    old = text.replace("stack_frame_id=3", r'source_file="\303\266.py" source_line=4')
    module = hlo.parse(old)
    assert module.frames(module.computations[module.entry].root) == (
        StackFrame("ö.py", 4),
    )


def test_an_instruction_without_metadata_has_no_stack(module):
    assert module.frames(module.computations["pair"].root) == ()


@pytest.mark.parametrize(
    ("dtype", "dims", "nbytes"),
    [
        ("f32", (), 4),
        ("bf16", (3, 5), 30),
        ("pred", (8,), 8),
        ("s4", (3,), 2),
        ("f8e4m3fn", (7,), 7),
        ("c64", (2,), 16),
        ("f32", (0, 4), 0),
        ("token", (), 0),
    ],
)
def test_the_size_of_a_shape(dtype, dims, nbytes):
    assert Shape(dtype, dims).nbytes == nbytes


def test_a_bounded_dim_has_its_bound():
    module = hlo.parse("HloModule m\nENTRY e {\n  ROOT x = f32[<=8,2] parameter(0)\n}")
    assert module.computations["e"].root.shapes == (Shape("f32", (8, 2)),)


def test_text_without_computations_is_refused():
    with pytest.raises(ValueError, match="it is not a compiled module"):
        hlo.parse("module @jit_f {}")


def test_what_this_jax_compiles_is_read_whole():
    def step(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), c), x, None, length=3)

    square = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    text = jax.jit(step).lower(square).compile().as_text()
    module = hlo.parse(text)
    read = sum(len(c.instructions) for c in module.computations.values())
    assert read == text.count(" = ")
    entry = module.computations[module.entry]
    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    assert len(loops) == 1
    assert module.frames(loops[0])[0].file == __file__
    assert [str(s) for s in entry.root.shapes] == ["f32[512,512]", "f32[3,512,512]"]
