"""What is done with a trained agent or a task: export, videos, recorded data, control runs.

Training never imports from here.
"""
