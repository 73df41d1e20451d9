"""Runs on disk: configuration, registry, checkpoints, logs, run folders.

Nothing here steps an environment or updates a learner, except the manager that starts a run.
"""
