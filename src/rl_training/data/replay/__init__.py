"""Buffers that a loop samples from: transitions, priorities, sequences, frames, prior data.

Nothing here reads a file of a user; that is `data.datasets`.
"""
