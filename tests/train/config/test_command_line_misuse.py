# SPDX-License-Identifier: Apache-2.0
"""What is said of command lines that mean nothing, or would be dangerous."""

import json
from pathlib import Path

import pytest

from tessera.errors import TesseraError
from tessera.train.config.command_line import compose
from tessera.train.models.named_models import model_names
from tests.train.config.command_lines import CONFIGS_DIR, composed


def message(*overrides):
    with pytest.raises(TesseraError) as caught:
        composed(*overrides)
    return str(caught.value)


# --- what is refused


def test_a_misspelt_key_gets_a_hint():
    assert message("optimizer.beta3=0.9") == (
        "[T501] there is no setting 'optimizer.beta3'\n"
        "  got: optimizer.beta3=0.9\n"
        "  fix: did you mean 'optimizer.beta2'? Known: 'name', 'learning_rate', "
        "'scale_learning_rate', 'warmup_steps', 'schedule', 'final_fraction', 'beta1', "
        "'beta2', 'epsilon', 'weight_decay'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T501.html"
    )


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.stepz=5", "did you mean 'training.steps'?"),
        ("trainin.steps=5", "did you mean 'training.steps'?"),
        ("steps=5", "did you mean 'training.steps'?"),
        ("training.mesh_shape=[[1],[dp]]", "did you mean 'model.mesh_shape'?"),
        ("modle=tiny", "did you mean 'model'?"),
        ("data.noise=0", "did you mean 'data.synthetic.noise'?"),
        ("data.synthetic.noize=0", "did you mean 'data.synthetic.noise'?"),
        ("training.steps.x=3", "Known: none"),
        ("+training.foo=1", "--help lists every setting"),
        ("++training.foo=1", "--help lists every setting"),
        ("training={steps: 5, sead: 3}", "did you mean 'training.seed'?"),
        ("data/x=stdlib", "did you mean 'data'?"),
        ("data@x=stdlib", "did you mean 'data'?"),
        ("training.lr=0.1", "did you mean 'optimizer.learning_rate'?"),
        ("lr=0.1", "did you mean 'optimizer.learning_rate'?"),
        ("optimizer.wd=0", "did you mean 'optimizer.weight_decay'?"),
        ("training.batch_size=4", "write training.micro_batch_size=<rows of each"),
        ("training.learning_rat=1", "did you mean 'optimizer.learning_rate'?"),
        ("model.layers=2", "did you mean 'model.num_layers'?"),
        ("training.step=5", "did you mean 'training.steps'?"),
        ("epochs=3", "write training.steps=<epochs x rows of the data / rows of a st"),
        ("training.max_steps=5", "write training.steps=<steps>"),
        ("max_seq_length=512", "write training.sequence_length=<tokens>"),
        ("per_device_train_batch_size=4", "write training.micro_batch_size="),
        ("bf16=true", "write training.mixed_precision=bf16"),
        ("gradient_checkpointing=true", "write training.remat=full"),
        ("save_steps=10", "write training.checkpoint_every=<steps>"),
        ("sample_packing=true", "leave it out: rows are packed"),
        ("model.lora.r=8", "write model.lora.rank=<rank>"),
        ("fsdp=8", "write 'model.mesh_shape=[[8],[fsdp]]'"),
        ("config=mine.yaml", "write settings one by one"),
        ("hydra.job.name=x", "leave it out"),
        ("hydra/launcher=x", "leave it out"),
    ],
)
def test_keys_that_do_not_exist_are_T501(override, hint):
    said = message(override)
    assert said.startswith("[T501] ")
    assert hint in said


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("tiny", "write model=tiny, data=tiny or group.setting=tiny"),
        ("mine.yaml", "write settings one by one; config.yaml of a run, which"),
        ("recipe=sft", "write recipe=finetune"),
        ("training.steps=1e3", "write training.steps=1000"),
        ("training.resume=true", "use none, auto, or the folder of a run"),
        ("training.remat=true", "use none, named, dots, full or auto, a list with"),
        ("recipe=peft", "write recipe=lora"),
        ("recipe=orpo", "write recipe=preference preference.loss=orpo"),
        ("model.mesh_shape=8", "write sizes and axes: 'model.mesh_shape=[[4,2],[fsdp"),
    ],
)
def test_what_stands_in_the_wrong_form_is_T502(word, fix):
    said = message(word)
    assert said.startswith("[T502] ")
    assert f"  fix: {fix}" in said


def test_an_optimizer_takes_its_own_settings_only():
    assert message("optimizer=sgd", "optimizer.beta2=0.9").startswith(
        "[T501] there is no setting 'optimizer.beta2'"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "training.steps=5.5",
            "[T502] training.steps does not take this value\n"
            "  got: training.steps=5.5: Value '5.5' of type 'float' could not be "
            "converted to Integer\n"
            "  fix: give a value of the type that --help shows, or set one setting at "
            "a time\n",
        ),
        (
            "training.clip_norm=much",
            "[T502] training.clip_norm does not take this value\n"
            "  got: training.clip_norm=much: Value 'much' of type 'str' could not be "
            "converted to Float\n"
            "  fix: give a value of the type that --help shows, or set one setting at "
            "a time\n",
        ),
        (
            "rewards=exact",
            "[T502] rewards does not take this value\n"
            "  got: rewards=exact: Invalid value assigned: str is not a ListConfig, "
            "list or tuple.\n"
            "  fix: write 'rewards=[exact]'\n",
        ),
        (
            "rewards=[exact,length(most=200)]",
            "[T502] an argument is not an override\n"
            "  got: rewards=[exact,length(most=200)]: HydraException while evaluating "
            "'length(most=200)': Unknown function 'length'\n"
            "  fix: quote what has parentheses: "
            "'rewards=[exact,\"length(maximum=200)\"]'\n",
        ),
        (
            "training=null",
            "[T502] training does not take this value\n"
            "  got: training=null: field 'training' is not Optional\n"
            "  fix: give a value of the type that --help shows, or set one setting at "
            "a time\n",
        ),
        (
            "training.steps=1,2",
            "[T502] one run has one value of each setting\n"
            "  got: training.steps=1,2\n"
            "  fix: add --multirun for a run with each value, or quote text that has "
            "a comma: \"training.steps='…'\"\n",
        ),
        (
            "~training.steps",
            "[T502] a setting cannot be deleted\n"
            "  got: ~training.steps\n"
            "  fix: give it a value instead\n",
        ),
        (
            "++training.steps=5",
            "[T502] settings cannot be added, and this one is there already\n"
            "  got: ++training.steps=5\n"
            "  fix: leave out the +: training.steps=5\n",
        ),
        (
            "training.steps=[1",
            "[T502] an argument is not an override\n"
            "  got: training.steps=[1: no viable alternative at input '[1'\n"
            "  fix: write group.setting=value; put quotes around text with special "
            "characters, and others around those for the shell: "
            "\"group.setting='a b'\"\n",
        ),
        (
            "training.seed=${training.seed}",
            "[T502] a setting has no value\n"
            "  got: Recursive interpolation detected\n"
            "  fix: give it one, or refer to a setting that has one: "
            "${group.setting}\n",
        ),
        (
            "model.vocab_size=???",
            "[T502] a setting has no value\n"
            "  got: Missing mandatory value: vocab_size\n"
            "  fix: give it one, or refer to a setting that has one: "
            "${group.setting}\n",
        ),
        (
            "data=wikipedia",
            "[T502] there is no data 'wikipedia'\n"
            "  got: data=wikipedia\n"
            "  fix: Known: 'mixture', 'preferences', 'prompts', 'stdlib', "
            "'synthetic', 'text'\n"
            "  fix: for your own write data=./<file or folder>, or "
            "data=<organization>/wikipedia of the Hub\n",
        ),
    ],
)
def test_values_that_cannot_be_are_T502(override, expected):
    assert (
        message(override)
        == expected + "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html"
    )


def test_an_unknown_model_and_an_unknown_optimizer_have_their_own_codes():
    assert message("model=gemma3_1") == (
        "[T403] there is no model 'gemma3_1'\n"
        "  got: model=gemma3_1\n"
        f"  fix: did you mean 'gemma3_1b'? Known: {str(model_names())[1:-1]}\n"
        "  fix: these begin with random weights; for given ones write "
        "model=./<folder>, or model=<organization>/gemma3_1 of the Hub\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T403.html"
    )
    assert message("optimizer=adan") == (
        "[T505] there is no optimizer 'adan'\n"
        "  got: optimizer=adan\n"
        "  fix: did you mean 'adam'? Known: 'adafactor', 'adam', 'adamw', 'lion', "
        "'sgd'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T505.html"
    )


def test_a_file_outside_the_configuration_folder_cannot_be_chosen():
    assert message("optimizer=../../../etc/model").startswith("[T505] there is no ")
    # A path is the folder of a published model, of which only JSON is read.
    assert message("model=../../../etc/model").startswith("[T806] ../../../etc/model/")


def test_sizes_that_make_no_model_are_refused():
    assert message("model.num_kv_heads=3").startswith("[T405] ")


def test_all_mistakes_come_at_once():
    assert message(
        "optimizer.beta3=1",
        "training.gradient_accumulation_steps=4",
        "training.sync_gradients_every=3",
        "training.mixed_precision=fp4",
        "training.steps=five",
        "model.mesh_shape=[[2],[sp]]",
    ).splitlines()[:6] == [
        "[T501] 5 things in the configuration cannot be used",
        "  got: 1. [T501] there is no setting 'optimizer.beta3': optimizer.beta3=1",
        "  got: 2. [T502] training.steps does not take this value: "
        "training.steps=five: Value 'five' of type 'str' could not be converted to "
        "Integer",
        "  got: 3. [T103] the model has no use for mesh axes 'sp': "
        "model.mesh_shape=[[2],[sp]]",
        "  got: 4. [T502] training.mixed_precision does not take this value: "
        "training.mixed_precision=fp4",
        "  got: 5. [T503] training.sync_gradients_every does not divide "
        "training.gradient_accumulation_steps: 4 / 3 leaves 1",
    ]


# --- what would be dangerous


@pytest.mark.parametrize(
    "override",
    [
        "training._target_=os.system",
        "+data._target_=os.system",
        "optimizer={_target_: os.system}",
        "optimizer._partial_=true",
    ],
)
def test_nothing_can_be_instantiated(override):
    assert message(override).startswith(("[T502] a configuration holds", "[T501]"))


SECRET = "hunter2"


@pytest.mark.parametrize(
    "override",
    [
        "data.path=${oc.env:SECRET}",
        "data.path=x${oc.env:SECRET}y",
        "data.path='${oc.env:${name}}'",
        "data.path='${${name}:SECRET}'",
        "hydra.run.dir=out/${oc.env:SECRET}",
        "hydra.run.dir=${hydra:runtime.cwd}",
        "name=${oc.env:SECRET}",
        "model.definition=${oc.env:SECRET}",
        "model.mesh_shape=[[1],['${oc.env:SECRET}']]",
    ],
)
def test_the_environment_cannot_get_into_the_saved_configuration(override, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    said = message("data=text", override)
    assert said.startswith("[T502] ")
    assert "reads something outside the configuration" in said
    assert SECRET not in said


@pytest.mark.full
def test_what_a_file_holds_is_judged_like_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    folder = tmp_path / "configs"
    for file in CONFIGS_DIR.rglob("*.yaml"):
        copy = folder / file.relative_to(CONFIGS_DIR)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())

    def said_of(text):
        (folder / "data" / "mine.yaml").write_text(text)
        with pytest.raises(TesseraError) as caught:
            compose(["data=mine"], folder)
        return str(caught.value)

    for path in (
        "${oc.env:SECRET}",
        "${oc.decode:'${oc.env:SECRET}'}",
        "${oc.env:${name}}",
        "${${name}:SECRET}",
    ):
        assert said_of(f"name: text\npath: {path}\n").startswith(
            "[T502] data.path reads something outside the configuration\n"
        )
    assert said_of("name: text\npaht: books\n") == (
        "[T501] there is no setting 'data.paht'\n"
        "  got: In 'data/mine'\n"
        "  fix: did you mean 'data.path'?\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T501.html"
    )
    assert said_of("name: text\n_target_: os.system\n").startswith("[T50")
    assert said_of("prefetch: many\n").startswith(
        f"[T502] the files of {folder} do not make a configuration\n"
        "  got: In 'data/mine': ValidationError raised while composing config:\n"
    )
    assert said_of("name: [text\n").startswith(
        f"[T502] the files of {folder} do not make a configuration\n"
    )


@pytest.mark.parametrize("text", ["hydra.run.dir=''", 'hydra.run.dir="a\0b"'])
def test_an_output_folder_needs_a_name(text):
    said = message(text)
    assert said.startswith("[T504] the run has no folder to write to\n")


def test_what_a_later_value_replaces_is_never_resolved(monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    given = ["model.num_layers=${oc.env:SECRET}", "model.num_layers=2"]
    assert compose(given, CONFIGS_DIR).flat["model.num_layers"] == "2"


def test_a_file_in_the_place_of_a_group_s_name_says_all_that_is_to_be_typed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    Path("chats.jsonl").write_text(json.dumps(chat) + "\n")
    Path("book.txt").write_text("Call me Ishmael.")
    for name, setting in (
        ("chats.jsonl", " data.messages_key=messages"),
        ("book.txt", ""),
    ):
        with pytest.raises(TesseraError) as caught:
            composed(f"data={name}")
        assert caught.value.fix == f"write data=./{name}{setting} for what is here"
