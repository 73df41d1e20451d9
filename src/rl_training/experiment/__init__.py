"""Runs on disk: configuration, registry, checkpoints, logs."""
