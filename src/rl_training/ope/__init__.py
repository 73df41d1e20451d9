"""Off-policy evaluation: what a policy is worth, estimated from recorded data alone.

Nothing here steps an environment or changes a policy.
"""
