"""What an attempt of an elastic run trains on: its own config, laid out for the nodes that it got.

Called by hpcmoe.runs.arrive before any rank starts. Batch, data order and optimizer stay as they are in the run's config.yaml;
a checkpoint of any layout loads into any other. Not for choosing: hpcmoe.planner.elastic.
"""

from __future__ import annotations

from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.rundir import RunDir

SIZES = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "ep_placement", "schedule", "microbatch", "recompute")


def settle(run: RunDir, attempt: str, nodes: int) -> None:
    """Write the attempt's config and journal its layout. Raises UserError where ``nodes`` nodes make none."""
    from hpcmoe.config.freeze import freeze, load_frozen  # not needed where a run is not elastic, and an import takes its time
    from hpcmoe.planner.elastic import lay_out

    config = lay_out(load_frozen(run.config), nodes)
    run.attempt(attempt).mkdir(parents=True, exist_ok=True)
    freeze(config, run.attempt_config(attempt))
    before = next((event for event in reversed(read_journal(run.journal)) if event["event"] == "laid_out"), {})
    Journal(run.journal, attempt).append(
        "laid_out",
        nodes=nodes,
        nodes_before=before.get("nodes"),
        world_size=config.world_size,
        layout={name: getattr(config.layout, name) for name in SIZES},
        global_batch_tokens=config.train.global_batch_tokens,
    )
