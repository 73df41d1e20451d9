"""Speed of this package beside its peers and against its bars: `python -m bench --help`."""
