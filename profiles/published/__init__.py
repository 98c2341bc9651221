"""Published tcgen05 programs on the software GPU, as their authors wrote them.

Nothing of such a program is in this repository: ``--from`` names a folder with local copies, and
``programs.py`` what to call in them.  A program sees a torch and a CuTe DSL that claim to be on a
B200 (``blackwell.py``); what it compiles is exported and loaded by softgpu, and its launches run
there under several schedules (``launches.py``).  Inputs, references and tolerances are the
program's own wherever it brings them.
"""
