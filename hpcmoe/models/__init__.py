"""The MoE transformer: attention, router, experts, dispatch. Modules of one process; knows no run and no life cycle."""
