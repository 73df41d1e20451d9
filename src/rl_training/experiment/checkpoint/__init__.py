"""Checkpoints on disk: files, manifest, tensors, segments, saving and loading.

What a learner or a loop holds is not known here; they give and take trees of state.
"""
