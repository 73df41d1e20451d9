"""What is learned: the gates, runs over several seeds, their records and the page of results.

Nothing here is about speed.
"""
