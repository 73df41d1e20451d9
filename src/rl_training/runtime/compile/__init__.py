"""Who executes an update: eager, a compiled program or a CUDA graph, and the proof that they agree.

What an update computes is not decided here.
"""
