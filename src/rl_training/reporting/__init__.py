"""Runs compared: gathering them, the figures over their seeds, and the page that shows them."""
