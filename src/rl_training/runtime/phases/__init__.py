"""What a method adds to its loop: prior data, imagined transitions, demonstrations.

A loop calls phases at fixed points and knows nothing else of them; what is learned is decided in
`algorithms`.
"""
