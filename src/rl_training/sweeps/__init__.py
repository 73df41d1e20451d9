"""Many runs: sweeps over settings and seeds, and tuning, on one machine or a cluster.

A single run is `runtime`'s; nothing here looks inside one.
"""
