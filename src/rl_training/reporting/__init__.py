"""Runs compared: gathering them, the statistics over their seeds, and the page that shows them.

Nothing here trains, and a report never changes a run.
"""
