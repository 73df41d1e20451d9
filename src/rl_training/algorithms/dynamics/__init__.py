"""The learned model of the dynamics that MBPO, MOPO and PETS share: loss, fit and rollouts.

No policy and no planner lives here; what acts in the model holds it.
"""
