"""Many runs: sweeps over settings and seeds, and tuning, here or on a cluster."""
