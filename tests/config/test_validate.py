"""What cannot run is refused with the key, its value and what would be right; what was left open is filled in."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hpcmoe.config.choices import CHOICES, POSITIVE, ZERO_OR_MORE
from hpcmoe.config.compose import compose, load, to_config
from hpcmoe.config.freeze import freeze, load_frozen, to_plain
from hpcmoe.config.names import schema_keys
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError

REFUSED = [
    # layout: world = pp x dp_replicate x dp_shard x tp
    (["layout.dp_shard=3"], "x dp_shard=3 = 3 must be nodes=1 x gpus_per_node=4 = 4 ranks; layout.dp_shard=4 would be right"),
    (["layout.dp_replicate=3"], "dp_replicate=3 x tp=1 = 3 must divide nodes=1 x gpus_per_node=4 = 4 ranks"),
    (["layout.dp_replicate=2", "layout.dp_shard=4"], "layout.dp_shard=2 would be right"),
    (["layout.ep=3"], "layout.ep=3 must divide model.experts=8; 2 or 4 would do"),
    (["layout.ep=8"], "layout.ep=8 must divide dp_shard x tp = 4 ranks; 4 would do"),
    (["layout.dp_replicate=2", "layout.ep=4"], "layout.ep=4 must divide dp_shard x tp = 2 ranks; 2 would do"),
    (["model.experts=6", "layout.ep=4"], "layout.ep=4 must divide model.experts=6; 2 would do"),
    (["layout.tp=4"], "layout.tp=4 does not divide model.kv_heads=2"),
    (["layout.tp=2", "train.seq_len=127", "train.global_batch_tokens=2032"], "layout.tp=2 does not divide train.seq_len=127"),
    (["layout.pp=4", "layout.schedule=ZBVZeroBubble"], "makes 8 stages of model.layers=4"),
    (["layout.pp=2", "model.tied_embeddings=true"], "input table and head are one matrix; use pp=1"),
    (["layout.pp=2", "train.global_batch_tokens=256"], "needs at least 2 microbatches a step and has 1"),
    (["layout.pp=2", "layout.schedule=DualPipeV", "layout.recompute=full"], "layout.recompute=full does not go with"),
    # batch
    (
        ["train.global_batch_tokens=4000"],
        "train.global_batch_tokens=4000 must be a multiple of train.seq_len=128 x 4 data-parallel ranks = 512; "
        "3584 or 4096 would do",
    ),
    (["train.global_batch_tokens=128"], "= 512; 512 would do"),
    (["layout.microbatch=3"], "layout.microbatch=3 must divide the 8 sequences a rank trains on per step; 2 or 4 would do"),
    (["train.seq_len=2048", "train.global_batch_tokens=8192"], "train.seq_len=2048 must be at most model.max_seq_len=1024"),
    # model
    (["model.kv_heads=3"], "model.kv_heads=3 must divide model.heads=4; 2 or 4 would do"),
    (["model.top_k=9"], "model.top_k=9 must be at most model.experts=8"),
    (["model.head_dim=15"], "model.head_dim=15 must be even"),
    (["model.groups=3"], "model.groups=3 must divide model.experts=8"),
    (["model.top_groups=2"], "model.top_groups=2 must be at most model.groups=1"),
    (["model.groups=8"], "model.top_k=2 experts are not to be found in model.top_groups=1 groups of 1; raise top_groups"),
    (["model.first_dense_layers=5", "model.ffn=9"], "model.first_dense_layers=5 must be at most model.layers=4"),
    (["model.first_dense_layers=1"], "model.first_dense_layers=1 needs model.ffn"),
    # what this version's engine has no code for
    (["model.vocab_size=200"], "model.vocab_size=200 is too small for data.tokenizer=byte, which has 257 tokens"),
    (["precision.moments=bf16", "optim.betas=[0.9,0.999]"], "use betas up to 0.99, or precision.moments=fp32"),
    (["model=deepseek_v2_lite", "precision=bf16", "train.global_batch_tokens=4096"], "can be planned but not trained yet"),
    # cluster
    (["nodes=2"], "nodes=2: cluster=local is this machine alone; set nodes=1, or choose a Slurm cluster"),
    (["cluster=testbed", "nodes=5"], "nodes=5: testbed has 4"),
    (["cluster=leonardo"], "leonardo counts every job against a budget: set slurm.account=NAME"),
    (["cluster=leonardo", "slurm.account=x", "precision=fp8"], "(leonardo) has no FP8 units; use precision=bf16"),
    (["precision=fp8"], "precision=fp8: cpu (local) has no FP8 units"),
    # Slurm's time
    (["cluster=testbed", "slurm.time=soon"], "slurm.time='soon' is not a time of Slurm's; write minutes, M:S, H:M:S"),
    (["cluster=testbed", "slurm.time='0'"], "slurm.time"),
    (["cluster=testbed", "slurm.time='2'"], "resilience.stop_lead_s=120 (seconds before the end"),
    (["cluster=testbed", "resilience.stop_lead_s=soon"], "resilience.stop_lead_s=soon must be a whole number of seconds"),
    (
        ["cluster=testbed", "resilience.stop_lead_s=0"],
        "resilience.stop_lead_s=0 must be a whole number of seconds above zero, or auto",
    ),
    (["cluster=testbed", "resilience.straggler=exlude"], "did you mean 'exclude'"),
    (["cluster=testbed", "slurm.time='0:01:00'"], "must be below slurm.time=0:01:00 (60 s)"),
    # data
    (["data=text"], "data=text needs data.path"),
    # optimizer
    (["optim.betas=[0.9]"], "optim.betas=[0.9] must be two numbers"),
    (["optim.betas=[0.9,1.0]"], "optim.betas=[0.9, 1.0] must be two numbers"),
    (["optim.min_lr_ratio=2"], "optim.min_lr_ratio=2.0 must be at most 1"),
    (["optim.schedule=wsd", "optim.decay_steps=95", "train.steps=100"], "are more than train.steps=100"),
    # a growing batch
    (
        ["train.batch_warmup.start_tokens=700", "train.batch_warmup.tokens=9"],
        "increment_tokens=700 (null: start_tokens) must divide train.global_batch_tokens - start_tokens = 3396",
    ),
    (
        ["train.batch_warmup.start_tokens=1000", "train.batch_warmup.tokens=9", "train.batch_warmup.increment_tokens=1032"],
        "train.batch_warmup.start_tokens=1000 must be a multiple of train.seq_len=128 x 4 data-parallel ranks = 512; "
        "512 or 1024 would do",
    ),
    (["train.batch_warmup.start_tokens=4096", "train.batch_warmup.tokens=9"], "must be below train.global_batch_tokens=4096"),
    (["train.batch_warmup.start_tokens=1024"], "needs train.batch_warmup.tokens"),
    (
        ["train.batch_warmup.start_tokens=512", "train.batch_warmup.tokens=9", "layout.microbatch=2"],
        "layout.microbatch=2 must divide the 1 sequences",
    ),
    # the profiler's window
    (["logging.profiler.steps=21"], "logging.profiler.steps=21 must be at most 20"),
    (["logging.profiler.ranks=[0,4]"], "logging.profiler.ranks=[0, 4] must be ranks of this run, 0 to 3"),
    # early stopping
    (["sweep.halving.first_rung=300", "train.steps=300"], "sweep.halving.first_rung=300 must be below train.steps=300"),
    (["sweep.halving.first_rung=10", "sweep.halving.eta=1"], "sweep.halving.eta=1 must be 2 or more"),
    (
        ["sweep.halving.first_rung=10", "sweep.halving.metric=eval_loss", "evaluation.interval=4"],
        "evaluation.interval=4 must divide sweep.halving.first_rung=10",
    ),
    (["sweep.halving.first_rung=10", "sweep.halving.metric=eval_loss"], "evaluation.interval=0 (no evaluation) must divide"),
    (["sweep.halving.metric=evalloss"], "did you mean 'eval_loss'"),
    (
        ["engine=command", "engine.command=[true]", "sweep.halving.first_rung=10"],
        "sweep.halving.first_rung=10: the steps and checkpoints of engine=command are not hpcmoe's",
    ),
    # numbers
    (["train.steps=0"], "train.steps=0 must be above zero"),
    (["nodes=-1"], "nodes=-1 must be above zero"),
    (["optim.lr=nan"], "optim.lr=nan must be above zero"),
    (["optim.lr=inf"], "optim.lr=inf must be above zero"),
    (["checkpoint.interval=-1"], "checkpoint.interval=-1 must be zero or more"),
    (["layout.ep=0"], "layout.ep=0 must be above zero"),
    # words
    (["optim.schedule=cosin"], "no optim.schedule 'cosin'; did you mean 'cosine'? valid: constant, cosine, wsd"),
    (["model.score=sigmoidal"], "no model.score 'sigmoidal'; did you mean 'sigmoid'?"),
    (["checkpoint.verify=ful"], "did you mean 'full'?"),
    (["layout.ep_placement=acros"], "did you mean 'across'?"),
    (["layout.recompute=slective"], "did you mean 'selective'?"),
    (["layout.schedule=1f1b"], "no layout.schedule '1f1b'"),
    (["data.source=web"], "no data.source 'web'; "),
    (["cluster.scheduler=slrum"], "did you mean 'slurm'?"),
]


@pytest.mark.parametrize(("overrides", "line"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_what_cannot_run_is_refused_with_what_would_be_right(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as raised:
        validate(load(overrides))
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


RESOLVED = [
    # overrides, (dp_shard, ep, microbatch)
    ([], (4, 4, 8)),
    (["cluster=testbed", "nodes=2"], (8, 4, 4)),  # experts stay within a node
    (["gpus_per_node=1"], (1, 1, 32)),
    (["gpus_per_node=3", "train.global_batch_tokens=3072"], (3, 1, 8)),  # 3 does not divide 8 experts
    (["layout.dp_replicate=2"], (2, 2, 8)),
    (["layout.ep=2"], (4, 2, 8)),
    (["layout.microbatch=2"], (4, 4, 2)),
    (["layout.tp=2", "layout.pp=2"], (1, 2, 16)),  # a pipeline of 2 needs 2 microbatches
    (["layout.pp=2", "layout.schedule=DualPipeV"], (2, 2, 4)),  # and this one 4
    (["train.batch_warmup.start_tokens=1024", "train.batch_warmup.tokens=9999"], (4, 4, 2)),  # fits every batch on the way
    (["train.seq_len=1024", "train.global_batch_tokens=131072"], (4, 4, 8)),  # 8192 tokens a microbatch at most
    (["model.max_seq_len=16384", "train.seq_len=16384", "train.global_batch_tokens=131072"], (4, 4, 1)),  # one at least
]


@pytest.mark.parametrize(("overrides", "sizes"), RESOLVED, ids=[" ".join(overrides) for overrides, _ in RESOLVED])
def test_what_was_left_open_is_filled_in(overrides: list[str], sizes: tuple[int, int, int]) -> None:
    layout = validate(load(overrides)).layout
    assert (layout.dp_shard, layout.ep, layout.microbatch) == sizes


def test_checking_leaves_its_argument_alone_and_changes_nothing_twice() -> None:
    config = load()
    before = copy.deepcopy(config)
    once = validate(config)
    assert config == before
    assert validate(once) == once


def test_a_relative_path_means_the_directory_of_the_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert validate(load(["data=text", "data.path=books"])).data.path == str(tmp_path / "books")


@pytest.mark.parametrize("time", ["10", "10:00", "0:10:00", "1-0", "1-0:30", "1-00:30:00", "UNLIMITED"])
def test_every_form_of_slurms_time_is_taken(time: str) -> None:
    assert validate(load(["cluster=testbed", f"slurm.time='{time}'"])).slurm.time == time


def test_an_account_satisfies_a_site_that_wants_one() -> None:
    assert validate(load(["cluster=leonardo", "slurm.account=AIFAC_x", "nodes=4", "precision=bf16"])).layout.dp_shard == 16


@pytest.mark.parametrize("key", [*CHOICES, *POSITIVE, *ZERO_OR_MORE])
def test_the_tables_name_keys_that_exist(key: str) -> None:
    assert key in schema_keys()


@pytest.mark.parametrize(
    ("cluster", "expected"), [("local", "fp32"), ("testbed", "fp32"), ("leonardo", "bf16"), ("lumi_g", "bf16")]
)
def test_a_run_that_names_no_precision_gets_the_clusters(cluster: str, expected: str) -> None:
    config = validate(load([f"cluster={cluster}", "slurm.account=x", "train.global_batch_tokens=16384"]))
    assert config.precision.name is not None
    assert config.precision.name.value == expected


def test_a_named_precision_is_kept() -> None:
    config = validate(load(["cluster=leonardo", "slurm.account=x", "precision=fp32"]))
    assert config.precision.name is not None
    assert config.precision.name.value == "fp32"


def test_a_command_needs_no_key_of_the_engines_own_and_says_what_it_does_need(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("defaults: [hpcmoe_schema, {cluster: local}, {engine: command}]\n")
    words = ["engine.command=[bash,train.sh,1]", "optim.lr=-1"]
    config = validate(to_config(compose(words, str(tmp_path), "bare")))
    assert (config.engine.command, config.engine.chdir) == (["bash", "train.sh", "1"], str(Path.cwd()))
    freeze(config, tmp_path / "config.yaml")
    assert to_plain(load_frozen(tmp_path / "config.yaml")) == to_plain(config)
    assert "train" not in to_plain(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=command"], "engine=command needs the command"),
        (["engine=command", "engine.command=[{a: 1}]"], "must be a list of words"),
        (["engine.command=[bash,train.sh]"], "engine.command=.* is for engine=command"),
        (["engine=command", "engine.command=x", "engine.stop_signal=TREM"], "did you mean 'TERM'"),
        (["engine=command", "engine.command=x", "engine.progress='step (\\d+)'"], "must have a group named step"),
        (["engine=command", "engine.command=x", "engine.progress='(?P<step>'"], "no regular expression"),
        (["engine=command", "engine.command=x", "engine.progress='(?P<stp>1)'"], "did you mean 'step'"),
        (["engine=command", "engine.command=x", "cluster=testbed", "nodes=1..2"], "with engine=command set nodes=N"),
        (
            ["engine=command", "engine.command=x", "cluster=testbed", "resilience.preflight=true", "engine.tasks_per_node=1"],
            "tests each GPU in a task of its own",
        ),
    ],
)
def test_what_a_command_cannot_be_is_said_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(load(overrides))
