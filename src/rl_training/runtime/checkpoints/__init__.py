"""A run to its checkpoints and back: saving, finding where to continue, another run's networks.

How a checkpoint lies on disk is in `experiment.checkpoint`.
"""
