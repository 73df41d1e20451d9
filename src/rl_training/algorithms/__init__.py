"""The algorithms, one file each: the paper's mathematics and its `SPEC`."""
