"""Reference run of td3: `python examples/td3_pendulum_reference.py --total-timesteps 2000`."""

from rl_training.tools.reference import reference_main

if __name__ == "__main__":
    reference_main("td3/pendulum")
