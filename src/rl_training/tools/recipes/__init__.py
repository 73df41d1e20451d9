"""Recorded data that anybody can make: recipes of benchmarks, made in shards and put together.

Each set says in its own description how it was made; nothing is downloaded.
"""
