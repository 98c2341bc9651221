"""Instantiates the variant matrix: enumerate, compile, audit, link, write artifacts.

``python -m codegen --help`` lists the commands.  Nothing here imports torch; only ``compile``
imports the CuTe DSL, and only inside worker processes.
"""
