"""Sizes that both sides of a comparison share."""

PPO = {"num_envs": 8, "num_steps": 128, "minibatch": 256, "epochs": 4, "hidden": [64, 64]}
DQN = {"batch": 64, "hidden": [64, 64], "learning_starts": 100, "buffer": 50_000, "target": 500}
SAC = {"obs": 17, "action": 6, "batch": 256, "hidden": [256, 256], "buffer": 100_000}
CHUNK = {"ppo": 40_960, "dqn": 3_000, "sac": 150}
"""Environment steps (ppo, dqn) or gradient steps (sac) per timed chunk."""
UNIT = {"ppo": "env steps/s", "dqn": "env steps/s", "sac": "gradient steps/s"}
