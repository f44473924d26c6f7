"""The schema of a run's configuration: one frozen-by-convention dataclass a Hydra group.

OmegaConf checks names and types against these classes while Hydra composes; hpcmoe.config.validate checks what types cannot
say. No torch here. Units stand in each field's comment. ``None`` means "not given".
"""

# No `from __future__ import annotations` here: dataclasses, OmegaConf and hpcmoe.config.names would each compile every
# annotation again, a tenth of what composing takes.

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from hpcmoe.config.cluster_schema import ClusterConfig
from hpcmoe.config.model_schema import ModelConfig


@dataclass
class SlurmConfig:
    """sbatch's own words (hyphens become underscores). ``extra``: further flags, verbatim, e.g. ["--switches=1@01:00:00"]."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None  # any Slurm time form: minutes, H:M:S, D-H...
    gres: str | None = None  # null: "gpu:<gpus_per_node>" where the cluster counts GPUs
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    comment: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    mem: str | None = None  # per node
    cpus_per_task: int | None = None
    exclusive: bool = False
    requeue: bool = True
    job_name: str | None = None
    dependency: str | None = None
    begin: str | None = None
    nice: int | None = None
    wckey: str | None = None
    licenses: str | None = None
    array_parallelism: int | None = None  # most runs of a sweep at once, over all of its arrays
    extra: list[str] = field(default_factory=list)  # further sbatch flags
    srun_extra: list[str] = field(default_factory=list)  # further srun flags


@dataclass
class EngineConfig:
    """What trains: hpcmoe's own engine, or any command (docs/engines.md)."""

    name: str = "hpcmoe"  # hpcmoe | command
    command: Any = None  # command: a list of words, or one text for `bash -c`; each task of the job starts it
    chdir: str | None = None  # command: where it starts; null: where the run was submitted
    tasks_per_node: int | None = (
        None  # command: null: gpus_per_node; 1: the command starts a node's ranks itself, as torchrun does
    )
    stop_signal: str = "TERM"  # command: what its process group gets when the run is told to leave
    progress: str | None = None  # command: regular expression, searched in rank 0's log; its group (?P<step>...) is the step
    checkpoint_glob: str | None = None  # command: a new or newer match is progress; relative to chdir


# What only hpcmoe's own engine reads. A run of another command has none of it: not checked, not frozen.
OWN_SECTIONS = frozenset({"model", "layout", "data", "train", "optim", "evaluation", "checkpoint", "precision"})


@dataclass
class LayoutConfig:
    """Sizes of the 4D layout. dp_shard = null: whatever is left of the world."""

    tp: int = 1
    pp: int = 1
    ep: int | None = None  # null: as many ranks of one node as divide the experts
    ep_placement: str | None = None  # inside: an ep group's ranks are neighbours; across: its efsdp group's are; null: inside
    dp_shard: int | None = None
    dp_replicate: int = 1
    schedule: str = "1F1B"  # pipeline schedule, in PyTorch's names
    microbatch: int | None = None  # sequences per microbatch per data-parallel rank; null: chosen
    recompute: str = "none"  # none | selective | layer | full: what backward computes again (docs/configuration.md)


@dataclass
class DataConfig:
    """Real text, byte-level or pre-tokenized. ``path`` null: Python's own standard-library sources."""

    source: str = "python_stdlib"  # python_stdlib | text
    path: str | None = None  # text: a file or a directory
    glob: str = "**/*.txt"  # text: which files below a directory
    tokenizer: str = "byte"
    max_bytes: int | None = None  # corpus is cut here; null: all of it


@dataclass
class BatchWarmupConfig:
    """The global batch grows from ``start_tokens`` to train.global_batch_tokens, in equal stairs."""

    start_tokens: int | None = None  # the first steps' batch; null: no warm-up
    increment_tokens: int | None = None  # height of a stair; null: start_tokens
    tokens: int = 0  # the batch is whole once so many have been trained on


@dataclass
class SkipConfig:
    """Which steps are not taken: their data is used up, weights and moments stay. What is not finite is never taken."""

    spike_sigma: float = 0.0  # a loss or gradient norm so many deviations above the recent mean is a spike; 0: no such test
    window: int = 128  # steps; the recent ones
    most_in_a_row: int = 5  # one more ends the run; 0: the first ends it
    most_in_window: int = 10  # of the recent steps; one more ends the run


@dataclass
class TrainConfig:
    """How long, on how much, from which seed."""

    steps: int = MISSING
    seq_len: int = MISSING  # tokens
    global_batch_tokens: int = MISSING  # tokens per optimizer step over all ranks
    seed: int = 0
    deterministic: bool = True
    batch_warmup: BatchWarmupConfig = field(default_factory=BatchWarmupConfig)
    skip: SkipConfig = field(default_factory=SkipConfig)


@dataclass
class EvaluationConfig:
    """Loss on text that training never sees: ``batches`` global batches, spread over the corpus, the same for every seed."""

    interval: int = 0  # steps between evaluations, and one after the last step; 0: none, and nothing is held out
    batches: int = 4


@dataclass
class OptimConfig:
    """The optimizer and its learning rate's course over the steps."""

    name: str = "adamw"
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    schedule: str = "cosine"  # cosine | wsd | constant
    warmup_steps: int = 0
    decay_steps: int | None = None  # wsd: the last so many steps
    min_lr_ratio: float = 0.1


@dataclass
class CheckpointConfig:
    """When a run saves, what it keeps, and how it makes sure of it."""

    interval: int | None = MISSING  # steps; null: chosen from save time and failures; 0: only when asked to and at the end
    max_interval_s: float | None = 1800.0  # s between two saves, however many steps that is; null: no such bound
    keep_last: int = 2  # newest so many
    keep_every: int | None = None  # and every step that is a multiple of this
    asynchronous: bool = True
    verify: str = "full"  # full: sizes and checksums before loading | size


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"


@dataclass
class PrecisionConfig:
    """Number formats, by where they are used."""

    name: Precision | None = None  # null: bf16 with GPUs, fp32 on CPUs (hpcmoe/config/precision.py)
    reduce: str = "fp32"  # dtype of gradient reductions
    moments: str = "fp32"  # dtype of AdamW's moments


@dataclass
class ResilienceConfig:
    """How a run leaves and comes back."""

    # --signal=B:USR1@T: seconds before the time limit at which the run saves and leaves; auto: as measured by the attempts before
    stop_lead_s: Any = 120
    max_attempts_without_progress: int = 3  # then FAILED, with the reason
    max_failures: int | None = 100  # crashes, hangs, out of memory: one more and the run is FAILED; null: no bound
    max_node_failures: int | None = 100  # likewise
    max_time_limits: int | None = None  # likewise
    max_preemptions_per_hour: int | None = 6  # after one more the next start waits until the hour is over; null: it never waits
    failure_backoff_s: float = 60.0  # wait before the second try without progress; doubles with each, up to an hour; 0: none
    max_gpu_hours: float | None = None  # over all attempts; then STOPPED, saved; null: no ceiling
    ask_above_gpu_hours: float | None = 1000.0  # submitting more than this asks first; null: never
    lift_hold: bool = True  # after a requeue, ask Slurm to start at once (the owner may)
    successor: bool = True  # where requeue is refused, submit a successor from inside the job
    kill_wait_s: int = 60  # srun --wait: seconds the other ranks get after the first one left
    hang_timeout_s: float = 900.0  # without progress inside a step; then the attempt ends as hung and comes back; 0: never
    hang_startup_timeout_s: float = 3600.0  # the same before the first step is done, and while a checkpoint is written
    rendezvous_timeout_s: float = 600.0  # until all ranks have met
    collective_timeout_s: float = 1800.0  # of one collective operation
    exclude_for_s: float = 86400.0  # how long a run stays away from a node that is to blame for an end; 0: it does not
    strikes_to_exclude: int = 2  # crashes of which one node is the origin; a node that was seen to fail has no second chance
    straggler: str = "report"  # a rank that computes more slowly than the others: report | exclude its node at the next start
    preflight: bool = False  # test every node of the job before the ranks start, for at most a minute
    flight_recorder: int = 2000  # last collectives that each rank remembers and writes down at a hang; 0: none


@dataclass
class ProfilerConfig:
    """A window of steps whose operations are traced into the attempt's directory (Chrome's trace format, gzipped)."""

    first_step: int | None = None  # null: no profile
    steps: int = 3
    ranks: list[int] = field(default_factory=lambda: [0])
    max_mb: int = 256  # a larger trace file is deleted again


@dataclass
class LoggingConfig:
    """What a run tells while it trains."""

    interval: int = 1  # steps between progress lines
    tensorboard: bool = True
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass
class HalvingConfig:
    """Early stopping of a sweep's runs at rungs, by asynchronous successive halving (docs/sweeps.md)."""

    first_rung: int | None = None  # step of the first rung; null: no early stopping
    eta: int = 3  # the best 1/eta of a rung go on; the next rung is at eta times the step
    metric: str = "loss"  # loss: of the rung's step | eval_loss: of the evaluation after it
    mode: str = "min"  # which is better: min | max


@dataclass
class SweepConfig:
    """How the runs of one sweep go together; the same for all of its points. No part of a run's own result."""

    skip_finished: bool = True  # a point whose configuration a run has COMPLETED already is not run again
    max_failures: int | None = None  # runs that FAILED: one more and the sweep is stopped; null: none stops it
    on_max_failures: str = "drain"  # drain: no further run starts | stop: those that run save and stop, too
    halving: HalvingConfig = field(default_factory=HalvingConfig)


@dataclass
class NotifyConfig:
    """Who is told when the run ends, fails or stands still (docs/watch.md). Nothing set: nobody."""

    mail: str | None = None  # an address, or several with commas between
    webhook: str | None = None  # http(s) URL: gets a JSON document by POST
    command: list[str] = field(default_factory=list)  # argv: gets the JSON document on its standard input
    events: list[str] = field(default_factory=lambda: ["end", "failure", "stall"])
    stall_minutes: float = 30.0  # RUNNING without a new step for so long is a stall


@dataclass
class Config:
    """Everything a run is. Frozen into run_dir/config.yaml at submit; every attempt reads that file and nothing else."""

    name: str | None = None
    nodes: int = 1  # of an elastic run: the most
    spare_nodes: int = 0  # nodes that the job asks for beside these, to take the place of those that fail the preflight
    min_nodes: int | None = None  # of an elastic run: the fewest; nodes=LOW..HIGH sets both. null: not elastic
    gpus_per_node: int = MISSING
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    env: dict[str, str] = field(default_factory=dict)  # exported to every rank, after the cluster's
    user: dict[str, Any] = field(default_factory=dict)  # the user's own notes; never read by hpcmoe

    @property
    def world_size(self) -> int:
        """Ranks over all nodes: one a GPU (on CPU clusters, one a slot). Of an elastic run: the most it may have."""
        return self.nodes * self.gpus_per_node

    @property
    def tasks_per_node(self) -> int:
        """Tasks that the job starts on each node."""
        return self.engine.tasks_per_node or self.gpus_per_node

    @property
    def runs_command(self) -> bool:
        """Does something else than hpcmoe's own engine train?"""
        return self.engine.name == "command"

    @property
    def elastic(self) -> bool:
        """May each attempt get another number of nodes, and a layout of its own?"""
        return self.min_nodes is not None


@dataclass
class WrittenConfig(Config):
    """What a person may write where ``Config`` has one number: ``nodes: 2..4``. For composing only (hpcmoe.config.compose)."""

    nodes: Any = 1
