"""Cost without a clock: what kernels ask of an SM's units, counted while they run.

``recorder`` watches launches, ``banks`` and ``rates`` know the units, ``sass`` estimates issued
instructions, ``profile`` adds up by role, ``timeline`` plays who waits for whom, ``trace`` and
``report`` say it.  docs/software-gpu.md has what is counted how, and how right it is.
"""
