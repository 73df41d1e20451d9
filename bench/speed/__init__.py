"""How fast the package is: rows, what they time, and the table beside the peers.

Nothing here asks what was learned.
"""
