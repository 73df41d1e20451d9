"""Reference run: `python examples/pets_pendulum_reference.py --total-timesteps 400`."""

from rl_training.tools.reference import reference_main

if __name__ == "__main__":
    reference_main("pets/pendulum")
