"""One rank from its start to its exit code: join the others, build, load, train, tell the batch shell how it ended.

0: verdict written; 2: the user's error; 1: anything else, with its traceback in the attempt's directory.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import hpcmoe
from hpcmoe.config.freeze import load_frozen
from hpcmoe.config.schema import Config
from hpcmoe.data.corpus import Corpus, load_corpus
from hpcmoe.data.loader import Loader
from hpcmoe.engine import manifest
from hpcmoe.engine.build import build
from hpcmoe.engine.callbacks.build import build_callbacks
from hpcmoe.engine.callbacks.callback import Phase
from hpcmoe.engine.callbacks.watchdog import Watchdog
from hpcmoe.engine.checkpoint import Checkpointer, Progress
from hpcmoe.engine.flight import record_collectives
from hpcmoe.engine.interval import SavePlan, end_of_job, measured_saves
from hpcmoe.engine.launch import Launch, check_world, read_launch
from hpcmoe.engine.numerics import set_numerics
from hpcmoe.engine.outlet import speak_through_outlets
from hpcmoe.engine.pace import Pace
from hpcmoe.engine.parallelize import init_weights
from hpcmoe.engine.peak import Peak, find_peak
from hpcmoe.engine.report import Reporter, quantity
from hpcmoe.engine.restore import load_newest
from hpcmoe.engine.rng import seed_everything
from hpcmoe.engine.stop import ControlFiles, StopSignals
from hpcmoe.engine.support import Sizes, check_engine
from hpcmoe.engine.trainer import Lead, Outcome, Trainer
from hpcmoe.engine.verdict import write_error, write_verdict
from hpcmoe.engine.world import NoDeviceError, check_placement, join_world, leave_world, pick_device
from hpcmoe.errors import UserError
from hpcmoe.models.accounting import parameters
from hpcmoe.runs.journal import Journal, PatientJournal, read_journal
from hpcmoe.runs.lead import AUTO, lead_of_job_s
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.story import attempts_of


class StartupClock:
    """Seconds from the process's first line to its first step, by part."""

    def __init__(self, begun: float) -> None:
        self._last = begun
        self.parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now = time.monotonic()
        self.parts[part] = round(now - self._last, 3)
        self._last = now


def run_rank(run_dir: Path, signals: StopSignals, begun: float) -> int:
    """Never returns on a failure that other ranks could be waiting for: threads in a collective would hold the exit."""
    clock = StartupClock(begun)
    clock.mark("imports")
    speak_through_outlets()
    run = RunDir(run_dir.absolute())
    launch: Launch | None = None
    try:
        launch = read_launch(run.path, os.environ)
        own = run.attempt_config(launch.attempt)  # of an elastic run
        config = load_frozen(own if own.exists() else run.config)
        outcome = _train(run, launch, config, signals, clock)
        if launch.rank == 0:
            write_verdict(run, launch.attempt, outcome.verdict, outcome.step, outcome.source, outcome.reason)
        leave_world()
        code = 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if launch is not None and _may_be_the_node_s(error, run, launch):
            write_error(run, launch.attempt, launch.rank, error)
            os._exit(1)
        attempt = launch.attempt if launch is not None else os.environ.get("HPCMOE_ATTEMPT", "unknown")
        newest = manifest.published(run.checkpoints)
        write_verdict(run, attempt, "failed", newest[0] if newest else 0, reason=str(error))
        code = 2
    except BaseException as error:
        traceback.print_exc()
        if launch is not None:
            write_error(run, launch.attempt, launch.rank, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _may_be_the_node_s(error: UserError, run: RunDir, launch: Launch) -> bool:
    """A GPU that is missing on one of several nodes, or was there before, is no mistake of the user's: the run comes back."""
    several = launch.world_size > launch.local_world_size
    return isinstance(error, NoDeviceError) and (several or bool(manifest.published(run.checkpoints)))


def _train(run: RunDir, launch: Launch, config: Config, signals: StopSignals, clock: StartupClock) -> Outcome:
    check_world(launch, config.world_size, config.gpus_per_node)
    sizes = check_engine(config)
    device = pick_device(config.cluster.device, launch.local_rank)
    set_numerics(config)
    record_collectives(config.resilience.flight_recorder, run.attempt(launch.attempt), os.environ)
    watchdog = _watchdog(run, launch, config)

    def turn_to(phase: Phase) -> None:
        if watchdog is not None:
            watchdog.entering(0, phase)

    join_world(launch, device, config.resilience.rendezvous_timeout_s, config.resilience.collective_timeout_s)
    check_placement(sizes)
    clock.mark("rendezvous")

    turn_to("corpus")
    corpus = load_corpus(config.data)
    held_out = config.evaluation.batches * sizes.global_batch if config.evaluation.interval else 0
    loader = Loader(corpus, config.train.seq_len, config.train.seed, held_out)
    clock.mark("corpus")

    turn_to("build")
    seed_everything(config.train.seed, launch.rank)
    built = build(config, sizes, device)
    stages, optimizer = built.stages, built.optimizer
    clock.mark("build")

    turn_to("load")
    journal = PatientJournal(run.journal, launch.attempt) if launch.rank == 0 else None
    facts = _facts(config, sizes)
    run.checkpoints.mkdir(exist_ok=True)
    checkpointer = Checkpointer(run.checkpoints, launch.attempt, config.checkpoint, facts, journal, config.model)
    nodes = _same_corpus_everywhere(corpus, checkpointer.group)
    progress = load_newest(
        run.checkpoints, config.checkpoint.verify, facts, stages, optimizer, checkpointer.group, journal, checkpointer.unsound
    )
    if progress is None:
        init_weights(stages, config.train.seed)  # again: a checkpoint that failed half-way may have been loaded
        optimizer.state.clear()
        progress = Progress(corpus=corpus.fingerprint, held_out=held_out)
    else:
        _same_corpus_as_before(progress, corpus, held_out)
        checkpointer.saved_step = progress.step
    if launch.rank == 0:
        manifest.sweep_scraps(run.checkpoints, launch.attempt)
    clock.mark("load")

    peak = find_peak(config, device, launch.local_world_size)
    clock.mark("peak")
    lead = None
    if journal is not None:
        for line in _banner(config, sizes, device, corpus, peak, progress):
            print(line, flush=True)
        tensorboard = run.tensorboard if config.logging.tensorboard else None
        reporter = Reporter(run.metrics, tensorboard, progress.step + 1, config.train.steps, config.logging.interval, peak)
        plan = _save_plan(run, launch, config, checkpointer, journal, progress.step)
        lead = Lead(journal, ControlFiles(run.control, run.notice(launch.attempt)), reporter, plan)

    pace = Pace(device)
    pace.watch(stages)

    def first_step(step: int) -> None:
        clock.mark("first_step")
        if journal is not None:
            journal.append("first_step", step=step, startup=clock.parts)

    trainer = Trainer(
        config=config,
        sizes=sizes,
        attempt=launch.attempt,
        data_rank=built.meshes.data_rank(),
        device=device,
        stages=stages,
        compute=built.compute,
        optimizer=optimizer,
        loader=loader,
        checkpointer=checkpointer,
        progress=progress,
        signals=signals,
        peak=peak,
        lead=lead,
        pace=pace,
        on_first_step=first_step,
    )
    trainer.callbacks = build_callbacks(trainer, launch.rank, run.attempt(launch.attempt), watchdog, nodes)
    try:
        outcome = trainer.run()
    finally:  # a rank that lost its peers may still write what a full disk did not take
        if lead is not None and journal is not None:
            lead.reporter.close()
            journal.flush()
    if lead is not None:
        print(f"{outcome.verdict} at step {outcome.step}", flush=True)
    return outcome


def _save_plan(run: RunDir, launch: Launch, config: Config, checkpointer: Checkpointer, journal: Journal, step: int) -> SavePlan:
    """From what the run's earlier attempts measured and how they ended."""
    events = read_journal(run.journal)
    checkpointer.save_seconds[:] = measured_saves(events)
    given, job_id = config.resilience.stop_lead_s, launch.attempt.rpartition(".")[0]
    lead_s = lead_of_job_s(given, events, job_id) if config.cluster.scheduler == "slurm" else math.inf
    attempts, end = attempts_of(events, []), end_of_job(events, launch.attempt)
    return SavePlan(config.checkpoint, checkpointer, journal, attempts, config.nodes, step, lead_s, given == AUTO, end)


def _watchdog(run: RunDir, launch: Launch, config: Config) -> Watchdog | None:
    """One that watches from now on, so that start-up is in its sight."""
    timeout, startup = config.resilience.hang_timeout_s, config.resilience.hang_startup_timeout_s
    if not timeout:
        return None
    return Watchdog(run, launch.attempt, launch.rank, launch.world_size, timeout, startup).start()


def _facts(config: Config, sizes: Sizes) -> dict[str, object]:
    """What a checkpoint's manifest tells; ``model`` must agree when it is loaded."""
    model = config.model
    shape = {key: getattr(model, key) for key in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "experts")}
    return {
        "hpcmoe": hpcmoe.__version__,
        "torch": torch.__version__,
        "world_size": config.world_size,
        "layout": str(sizes),
        "microbatch": sizes.microbatch,
        "experts": model.experts,
        "model": shape | {"expert_ffn": model.expert_ffn, "parameters": parameters(model).total},
    }


def _same_corpus_everywhere(corpus: Corpus, group: dist.ProcessGroup) -> list[str]:
    """Each rank's node, as Slurm calls it. Raises UserError on all ranks where one reads another corpus."""
    told: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    dist.all_gather_object(told, (corpus.fingerprint, node), group=group)
    strangers = [rank for rank, (fingerprint, _) in enumerate(told) if fingerprint != told[0][0]]
    if strangers:
        raise UserError(
            f"ranks {strangers} read another corpus than rank 0 ({corpus.description}); every node must have the same files"
        )
    return [node for _, node in told]


def _same_corpus_as_before(progress: Progress, corpus: Corpus, held_out: int) -> None:
    if progress.corpus != corpus.fingerprint:
        raise UserError(
            f"the checkpoint of step {progress.step} was trained on a corpus with fingerprint {progress.corpus[:12]}, "
            f"this one has {corpus.fingerprint[:12]} ({corpus.description}); resume with the same Python or the same files"
        )
    if progress.held_out != held_out:
        raise UserError(
            f"the checkpoint of step {progress.step} held out {progress.held_out} sequences, config.yaml holds out "
            f"{held_out}: evaluation.batches, and whether evaluation.interval is 0, stay as they were when the run began"
        )


def _banner(config: Config, sizes: Sizes, device: torch.device, corpus: Corpus, peak: Peak, progress: Progress) -> list[str]:
    model, counts = config.model, parameters(config.model)
    threads = torch.get_num_threads()
    where = "CPU, gloo" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)}, NCCL"
    accumulation = sizes.global_batch // sizes.data_ranks // sizes.microbatch
    return [
        f"model    {model.name}: {quantity(counts.total)} parameters, {quantity(counts.active)} active; {model.layers} layers, "
        f"hidden {model.hidden}, {model.experts} experts, top {model.top_k}",
        f"layout   {config.world_size} ranks: {sizes}; {threads} thread(s) each; {where}; {peak.precision} ({peak})",
        f"data     {corpus.description}; {config.train.seq_len} tokens x {sizes.global_batch} sequences a step "
        f"({sizes.data_ranks} ranks x {accumulation} microbatches of {sizes.microbatch})",
        f"{'resume' if progress.step else 'start '}   after step {progress.step} of {config.train.steps}",
    ]
