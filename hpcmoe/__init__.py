"""hpcmoe: Slurm-native orchestration and training of Mixture-of-Experts language models.

Importing this package costs nothing: no torch, no Hydra. Each room is imported by the verb that needs it.
"""

__version__ = "0.1.0.dev0"
