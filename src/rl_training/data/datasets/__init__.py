"""Recorded data: where it comes from, how it is checked, its units and its scores.

Nothing here is drawn from by a learner; a buffer of `data.replay` holds what was loaded.
"""
