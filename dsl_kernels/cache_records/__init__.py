"""How a paged cache stores a token: a file a record, which kernels, hosts and docs read.

``record.py`` says what a record is; ``families/formats.py`` lists them.  Nothing is imported here:
a kernel imports the record that it reads, and so is not compiled anew for another one.
"""
