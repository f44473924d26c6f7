"""Names of what lies in a run directory. Knows no Slurm, no torch, no config schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """One run's directory. Every path below it is named here and nowhere else."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        return self.path / "overrides.txt"

    @property
    def provenance(self) -> Path:
        """Its own; the runs of a sweep share one, which the journal's first line names."""
        return self.path / "provenance.json"

    @property
    def journal(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def script(self) -> Path:
        return self.path / "sbatch" / "attempt.sh"

    @property
    def claim(self) -> Path:
        return self.path / "claim.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, attempt: str) -> Path:
        return self.attempts / attempt

    def attempt_config(self, attempt: str) -> Path:
        """Of an elastic run: config.yaml, laid out for the nodes that this attempt got."""
        return self.attempt(attempt) / "config.yaml"

    def preflight(self, attempt: str) -> Path:
        """Figures of the test of the job's nodes, a file a rank."""
        return self.attempt(attempt) / "preflight"

    def srun_log(self, attempt: str) -> Path:
        """What srun itself said while it ran the attempt's ranks: which task failed first, and on which node."""
        return self.attempt(attempt) / "srun.log"

    def ranks_on(self, attempt: str) -> Path:
        """Where some nodes of the job have no ranks: how many have, the first of these, those that have not (``2 n01 n03``)."""
        return self.attempt(attempt) / "ranks-on"

    def verdict(self, attempt: str) -> Path:
        return self.attempt(attempt) / "verdict.json"

    def notice(self, attempt: str) -> Path:
        """Touched by the batch shell when it hears a signal; covers signals that come before a rank's handlers exist."""
        return self.attempt(attempt) / "notice"

    def hang(self, attempt: str) -> Path:
        """Written by the ranks' watchdog: nothing moved any more, and who was waited for."""
        return self.attempt(attempt) / "hang.json"

    def heartbeats(self, attempt: str) -> Path:
        """Signs of life, a small file a rank: ``STEP PHASE COUNT`` (hpcmoe.engine.hang)."""
        return self.attempt(attempt) / "heartbeats"

    def rank_log(self, attempt: str, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank:04d}.log"
