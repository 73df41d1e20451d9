"""Shared test material."""
