"""The contract suite: what every method must do, run on those of the package or on a plug-in.

`python -m rl_training.testing my_module:SPEC` runs it; the rest of the package
never imports from here.
"""
