"""The documentation site: pages from `docs/` and from the code, built into `site/`.

`python -m scripts.docs_site` stages Markdown that the generator can read as it is, runs the
generator strictly, and checks what came out.  Nothing here is part of the package.
"""
