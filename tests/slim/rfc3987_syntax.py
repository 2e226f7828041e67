"""In the place of a package of Jupyter's server: jsonschema, which reads notebooks, imports
it where it is there, and then compiles 39 grammars, for two CPU seconds a process. Without
it addresses are not checked, as where only `.[run]` is installed; notebooks have none.
"""

raise ImportError("left out of tests: tests/slim/rfc3987_syntax.py says why")
