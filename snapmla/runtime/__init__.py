"""Compiled kernels in this process: found, loaded, launched, watched.

variants.py  ``kernel``: a variant's function, found in the search path or compiled
env.py       environment variables, each with its default; folders that are searched
launch.py    arguments converted once, allocators, devices
watch.py     ``SNAPMLA_LOG`` and ``SNAPMLA_DUMP``: what each launch gets
dump.py      files of dumped launches
profiler.py  ranges of public calls for profilers
"""
