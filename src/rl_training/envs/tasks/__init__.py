"""What the package knows of single tasks: termination and reward functions, built-in games.

Nothing here steps several environments or knows of seeds.
"""
