"""Bytes in memory on which kernels and hosts agree: formats of cached tokens, lists, tables.

A file a format (``format.py`` says what one declares, ``registered.py`` lists them); the index
cache; dense prefill's list of work; FlashMLA's scheduling metadata.  Standard library only.
Nothing is imported here: a kernel imports the format that it reads, and so is not compiled anew for
another one.
"""
