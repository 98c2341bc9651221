"""Exported functions of decode: arguments, tensor maps, launch with the merge behind it."""
