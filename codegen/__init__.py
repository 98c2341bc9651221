"""Instantiates the variant matrix: enumerate, compile, audit, link, write artifacts.

``python -m codegen --help`` lists the commands.  Nothing here imports torch; kernel modules, and
with them the CuTe DSL, are imported for the reasons in the matrix and by worker processes.
"""
