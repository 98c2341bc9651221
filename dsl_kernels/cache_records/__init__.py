"""Formats of a paged cache: how each stores a token, one file a format (or a family of them), read
by kernels, hosts and docs.

``record.py`` declares a record; ``families/formats.py`` lists them.  Nothing is imported here: a
kernel imports the record that it reads, and so is not compiled anew if another one changes.
"""
