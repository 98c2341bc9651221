"""Loaders: what fills a kernel's rings from pages, lists of tokens and queries."""
