"""What watches a run: diverging losses, broken models, and what to tell the user of them.

Nothing here changes an update or a policy.
"""
