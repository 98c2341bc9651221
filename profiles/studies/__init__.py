"""Studies that answered their question: frozen, kept to be read.

They are outside of lint, types, tests and mutants (``extend-exclude`` in pyproject.toml), and
nothing else imports them.  A page of results names the commit that reproduces it: check that out,
since what these files import goes on changing.
"""
