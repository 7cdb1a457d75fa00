# SPDX-License-Identifier: Apache-2.0
"""Random command lines of ``run_training.py``, and the folder that they speak of.

Half of them are plausible: sizes of a small model, a mesh, an optimizer, data and what
goes with them, each legal by itself. The others have values that no setting takes, that
lie at the ends of its range, or that mean something else to Hydra.
"""

import os
import socket
from dataclasses import fields
from pathlib import Path
from random import Random

from tessera.train.config.help_text import group_settings
from tessera.train.config.optimizer_config import OPTIMIZERS
from tessera.train.config.post_training_config import GrpoConfig, PreferenceConfig
from tessera.train.config.run_config import ModelConfig, RuntimeConfig, TrainingConfig
from tessera.train.data.data_config import DataConfig, SyntheticConfig

CLASSES = {
    "model": [ModelConfig],
    "training": [TrainingConfig],
    "data": [DataConfig],
    "optimizer": list(OPTIMIZERS.values()),
    "runtime": [RuntimeConfig],
    "preference": [PreferenceConfig],
    "grpo": [GrpoConfig],
}
SETTINGS = sorted(
    {
        (f"{group}.{one.name}", one.type)
        for group, classes in CLASSES.items()
        for cls in classes
        for one in group_settings(group, cls)
    }
    | {("name", "text"), ("hydra.run.dir", "text"), ("recipe", "text")}
    | {("rewards", "list")}
)

# The ends of every range, and what lies beyond them.
EDGES = sorted(
    {
        f"{group}.{one.name}={limit + step}"
        for group, classes in (CLASSES | {"data.synthetic": [SyntheticConfig]}).items()
        for cls in classes
        for one in fields(cls)
        for name in ("least", "most", "above", "below")
        if (limit := one.metadata.get(name)) is not None
        # A deadline of a moment ends the process, as it should.
        if "deadline" not in one.name
        for step in (-1, 0, 1)
    }
    | {
        f"model.{name}={value}"
        for name, value in {
            **{"num_layers": 10_000, "vocab_size": 2**28, "d_model": 2**20},
            **{"mlp_dim": 2**24, "num_heads": 2**16, "num_kv_heads": 2**16},
            **{"head_dim": 2**16, "num_experts": 2**16, "window": 2**31 - 1},
            **{"global_every": 2**31 - 1, "scan_unroll": 2**31 - 1},
            **{"query_pre_attn_scalar": 1e-37},
            **{
                "norm_epsilon": 3e38,
                "rope_base_local": 1e-30,
                "rope_scale_global": 1e38,
            },
            **{"router_z_weight": 1e38, "experts_per_token": 2**16},
        }.items()
    }
)

# A model and a run of which the step is traced in a second.
SMALL = (
    *("model.d_model=16", "model.num_layers=2", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=8", "model.mlp_dim=16", "model.window=8"),
    *("training.sequence_length=16", "training.micro_batch_size=2"),
    *("data=synthetic", "data.synthetic.tokens=20000"),
)

NUMBERS = (
    *("0", "1", "2", "3", "7", "-1", "-0.0", "0.5", "1.0", "1e-8", "0x10", "1_000"),
    *("2147483647", "2147483648", "-2147483648", "4294967296", "9223372036854775807"),
    *("1e38", "3.5e38", "1e39", "1e-38", "1e-45", "1e-60", "1e308", "1e309", "-1e39"),
    *("nan", "inf", "-inf", "NaN", "Infinity", "9" * 23, "-" + "9" * 23, "9" * 5000),
    *("0.99999999", "0.9999999999", "1.0000001", "65536", "16777217", "1048577"),
)
WORDS = (
    *("none", "null", "true", "false", "auto", "full", "dots", "bytes", "''", "'0'"),
    *(
        "text",
        "jsonl",
        "\u00e9",
        "'\u2028'",
        "'a b'",
        "\U0001f600",
        "'\\ud800'",
        "a" * 9000,
    ),
    *('"a\0b"', '"\n"', "'\udcff'", "\u202e", "'${'", "'${x'", "\\${x}", "%", "'%n%s'"),
    *("__import__", "None", "NULL", "~", "yes", "off", "1:30", "2026-11-20", "0o17"),
)
NESTED = (
    *(
        "[]",
        "{}",
        "[[]]",
        "[1,2]",
        "[none,[none]]",
        "[[[[1]]]]",
        "{a:1}",
        "{a:{b:[c]}}",
    ),
    *("{1:2}", "{null:full}", "{global:[full]}", "{global:null}", "{local:full}"),
    *("[null]", "[nan]", "[true,false]", "[full,none]", "[full,full]", "{global:full}"),
    "[" * 300 + "]" * 300,
    "{a:" * 60 + "1" + "}" * 60,
)
MESHES = (
    *("[[1],[dp]]", "[[2],[dp]]", "[[8],[dp]]", "[[2,2],[fsdp,tp]]", "[[2],[tp]]"),
    *("[[2],[cp]]", "[[2],[pp]]", "[[2,2],[dp,pp]]", "[[2,2],[ep,dp]]", "[[1],[pp]]"),
    *("[[2,2,2],[dp,fsdp,tp]]", "[[-1],[dp]]", "[[-1,2],[dp,tp]]", "[[2,2],[cp,tp]]"),
    *("[[4,2],[ep_outer,ep]]", "[[2,2],[tp,pp]]", "[[3],[dp]]", "[[16],[fsdp]]"),
    *("[[2,4],[fsdp,dp]]", "[[1,1],[cp,tp]]", "[[2,2,2],[pp,cp,dp]]"),
)
BAD_MESHES = (
    *("[[0],[dp]]", "[[-2],[dp]]", "[[1.5],[dp]]", "[[true],[dp]]", "[[1],[[dp]]]"),
    *("[[1],dp]", "[1,dp]", "[[],[]]", "[[1,1],[dp,dp]]", "[[1],['']]", "[[1],[null]]"),
    *("[[-1,-1],[dp,tp]]", "[[1],[zz]]", "[[1],[dp],[tp]]", "{dp:1}", "[[2000],[dp]]"),
    *("[[100000000000000000000],[dp]]", "[[1024,1024,1024],[dp,fsdp,tp]]"),
    *(
        f"[[{','.join('1' * 40)}],[{','.join(f'a{i}' for i in range(40))}]]",
        "[[3],[tp]]",
    ),
)
PATHS = (
    *("/dev/zero", "/dev/null", "/dev/tty", "/proc/kmsg", "/proc/self/environ"),
    *("/proc/self/mem", "/proc/self/fd/0", "/proc/self/root", "/sys", "/proc", "pipe"),
    *("socket", "loop", "nowhere", "folder", "empty", "books.txt", "books.jsonl"),
    *("table.parquet", "folder/*.txt", "**/*.nothing", "'~nobody/x'", "'~'", "."),
    *("pipe/x", "books.txt/x", "link", "locked", "weights.safetensors", "words.json"),
    *(
        "'*'",
        "'[a'",
        "../" * 40 + "x",
        "x" * 300,
        "x/" * 2000,
        "words.model",
        "-",
        "//",
    ),
)
GRAMMAR = (
    *("+{k}={v}", "++{k}={v}", "~{k}", "~{k}={v}", "{k}", "={v}", "{k}==", "{k}=", "="),
    *("{k}={v},{v}", "{k}=choice({v},1)", "{k}=range(1,3)", "{k}=interval(0,1)"),
    *("{k}=glob(*)", "{k}=${{{k}}}", "{k}=${{training.steps}}", "{k}=${{oc.env:HOME}}"),
    *("{k}=${{now:%Y}}", "{k}=${{now:}}", "{k}=${{now:%}}", "{k}=${{{k}}}${{{k}}}"),
    *(
        "{k}=${{..x}}",
        "{k}=${{.}}",
        "{k}=${{hydra:runtime.cwd}}",
        "{k}=${{a:b,${{c}}}}",
    ),
    *("{k}=???", "{k}.x={v}", "{k}[0]={v}", "{k}@x={v}", "{k}/x={v}", "/{k}={v}"),
    *("hydra.{k}={v}", "hydra/launcher={v}", "hydra.searchpath=[{v}]", "hydra={v}"),
    *(
        "_target_={v}",
        "{k}={{_target_: os.system}}",
        "--{k}={v}",
        "--m",
        "--multirun=x",
    ),
    *("--config-dir={v}", "-cn={v}", "--cfg=hydra", "--info", "--version", "-h=1", ""),
    *("{k}=int({v})", "{k}=float({v})", "{k}=json_str({v})", "{k}=shuffle(1,2)"),
    *(
        "{k}=sort(3,2)",
        "{k}=tag(a,1)",
        "{k}={v} #x",
        " {k}={v}",
        "{k} = {v}",
        "{k}\n={v}",
    ),
    *("{k}:{v}", "{K}={v}", "training={v}", "model={v}", "data={v}", "optimizer={v}"),
    *(
        "runtime={v}",
        "training.{{steps}}=1",
        "training=null",
        "model=[tiny]",
        "{k}='{v}",
    ),
    *("training={{steps: {v}}}", "data.synthetic={v}", "defaults={v}", "hydra.run={v}"),
    *("\udcff={v}", "{k}=\\", "{k}=[", "{k}={{", "{k}=${{", "{k}=${{{{}}}}", "\0={v}"),
)
# Each is legal, and goes with some of the others.
FEATURES = (
    *("training.mixed_precision=bf16", "training.mixed_precision=fp16"),
    "training.mixed_precision=fp8",
    *("training.zero_stage=1", "training.zero_stage=2", "training.zero_stage=3"),
    *("training.offload_optimizer=true", "training.remat=full", "training.remat=dots"),
    *("training.remat=[full,none]", "training.remat={global:full}"),
    *("training.loss_chunk=4", "training.loss_chunk=none", "training.clip_norm=null"),
    "training.numerics=deterministic",
    *("training.reduction_parts=2", "training.reduction_parts=3", "training.seed=7"),
    *(
        "training.gradient_accumulation_steps=2",
        "training.gradient_accumulation_steps=4",
    ),
    *("training.sync_gradients_every=2", "training.pipeline_schedule=gpipe"),
    *("training.pipeline_schedule=interleaved", "training.pipeline_chunks=2"),
    "training.pipeline_gather=step",
    *("training.pipeline_schedule=zero_bubble", "training.profile_communication=true"),
    *("training.profile_wait=0", "training.steps=3", "training.validate_every=0"),
    *("training.checkpoint_every=null", "training.keep=1", "training.sample_length=0"),
    *(
        "training.sample_prompt=abc",
        "training.resume=auto",
        "training.resume_data=restart",
    ),
    *("training.dry_run=true", "training.max_skipped_steps=0", "training.log_every=1"),
    "training.on_spike=skip",
    *("training.spike_window=4", "runtime.verify_every=2"),
    *("training.sequence_length=17", "training.sequence_length=32", "data.prefetch=0"),
    *("training.micro_batch_size=3", "training.micro_batch_size=8"),
    *("data.validation_fraction=0", "data.synthetic.noise=0.5"),
    *("data.synthetic.vocab_size=50", "data.synthetic.vocab_size=5000"),
    *("optimizer.schedule=constant", "optimizer.schedule=linear"),
    *("optimizer.final_fraction=0.5", "optimizer.warmup_steps=0"),
    *("optimizer.scale_learning_rate=linear", "optimizer.learning_rate=0.01"),
    *("optimizer.momentum=0", "optimizer.nesterov=true", "optimizer.beta1=0"),
    *("optimizer.weight_decay=0", "optimizer.scale_by_parameter=false"),
    *("model.sequence_parallel=true", "model.context_parallel=all_to_all"),
    *("model.num_experts=4", "model.num_experts=0", "model.experts_per_token=1"),
    "model.router_balance_weight=0",
    *("model.global_every=1", "model.global_every=9", "model.scan_unroll=2"),
    *("model.num_layers=4", "model.vocab_size=300", "model.num_kv_heads=2"),
    *("model.rope_scale_global=8", "model.query_pre_attn_scalar=0.5", "name=mine"),
    *("runtime.platform=cpu", "runtime.max_steps_in_flight=1"),
    "runtime.step_deadline=null",
    *("hydra.run.dir=new/run", "optimizer.epsilon=1e-6", "optimizer.clip_update=2"),
)
TEXT = (
    ("data=text", "data.path=books.txt"),
    ("data=text", "data.path=books.jsonl"),
    ("data=text", "data.path=folder"),
    ("data=text", "data.path='folder/*.txt'"),
    ("data=text", "data.path=books.jsonl", "data.format=text"),
    ("data=text", "data.path=books.txt", "data.format=jsonl"),
    ("data=text", "data.path=books.jsonl", "data.text_key=body"),
)


def draw(random: Random) -> list[str]:
    """A command line."""
    kind = random.random()
    drawn = _plausible(random) if kind < 0.6 else [*SMALL]
    if kind >= 0.5:
        hostile = random.choice((_hostile, _hostile, _edge))
        drawn += [hostile(random) for _ in range(random.choice((1, 1, 1, 2, 4)))]
    if random.random() < 0.1:
        drawn.append(random.choice(drawn))
    if random.random() < 0.3:
        random.shuffle(drawn)
    return drawn


def _plausible(random: Random) -> list[str]:
    drawn = [*SMALL]
    if random.random() < 0.3:
        drawn.append("model=moe_tiny")
    if random.random() < 0.7:
        drawn.append(f"model.mesh_shape={random.choice(MESHES)}")
    if random.random() < 0.5:
        drawn.append(f"optimizer={random.choice(sorted(OPTIMIZERS))}")
    if random.random() < 0.25:
        drawn = [text for text in drawn if not text.startswith("data")]
        drawn += random.choice(TEXT)
    return drawn + random.sample(FEATURES, random.choice((0, 1, 1, 2, 3, 5)))


def _edge(random: Random) -> str:
    return random.choice(EDGES)


def _hostile(random: Random) -> str:
    if random.random() < 0.25:
        key, _ = random.choice(SETTINGS)
        value = random.choice((*NUMBERS, *WORDS))
        form = random.choice(GRAMMAR)
        return form.format(k=key, v=value, K=key.upper())
    key, kind = random.choice(SETTINGS)
    if key.endswith("mesh_shape"):
        return f"{key}={random.choice((*BAD_MESHES, *MESHES))}"
    values = random.choice((NUMBERS, NUMBERS, WORDS, NESTED))
    if kind.startswith("text") or random.random() < 0.05:
        values = random.choice((PATHS, PATHS, WORDS, NUMBERS, NESTED))
    value = random.choice(values)
    # A deadline of a moment ends the process, as it should.
    if key.endswith(("deadline", "period")) and value.startswith(("0.", "1e-", "1")):
        value = "600"
    return f"{key}={value}"


def fill(folder: Path) -> None:
    """Make what the command lines speak of, in the current folder."""
    text = "All happy families are alike.\n"
    (folder / "folder").mkdir()
    (folder / "empty").mkdir()
    for name in ("books.txt", "folder/a.txt", "folder/b.txt"):
        (folder / name).write_text(text * 300)
    (folder / "books.jsonl").write_text('{"text": "All happy families"}\n' * 300)
    (folder / "table.parquet").write_bytes(b"PAR1" + bytes(99))
    for name in ("weights.safetensors", "words.json", "words.model"):
        (folder / name).write_bytes(b"{}" * 40)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("/proc/self/environ")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
