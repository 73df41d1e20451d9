"""Speed of this package beside its peers: `python -m bench`."""
