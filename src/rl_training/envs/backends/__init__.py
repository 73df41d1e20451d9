"""How many environments are stepped at once: in turn, in processes, on Ray, as arrays.

What a task is (rewards, terminations) is not known here.
"""
