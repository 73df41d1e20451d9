"""Reference run of mopo: `python examples/mopo_pendulum_reference.py --total-timesteps 2000`."""

from rl_training.tools.reference import reference_main

if __name__ == "__main__":
    reference_main("mopo/pendulum")
