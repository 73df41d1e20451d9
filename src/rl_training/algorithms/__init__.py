"""The methods, a file or a room each: the paper's mathematics and its `SPEC`.

No loop, no file and no environment is known here.
"""
