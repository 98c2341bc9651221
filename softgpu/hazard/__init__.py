"""The hazard checker: happens-before between every two conflicting accesses.

For each granule of shared memory (and of global memory that the launch touches) a shadow keeps the
last write and the last read of each warp and asynchronous agent, as (component, time, event), see
``clocks``.  An access is a hazard when the accessing lane does not *know* a conflicting one,
whatever the order in which the simulation happened to run them.  So a missing wait, fence or
barrier is found even if the data came out right.

    clocks          who knows what: vector clocks of lanes, asynchronous agents and mbarriers
    shadow          last accesses of every granule of shared memory; what an accessor does not know
    warp            the rules, one object a warp: what the instruction handlers call
    registers       the rules for the registers of a warp's WGMMAs
    warpgroup       the rule for what four warps must execute alike
    tensor          the rules for tensor memory, one object a warp; ``tensor_clock``: who works on
                    it, ``tensor_shadow``: last accesses, ``tensor_reports``: the words
    cluster         one object a cluster: its shadow, what its mbarriers publish, the end of a block
    global_memory   one object a launch: races in global memory, and with the grid before it
    reports         how a broken rule is told: every kind of hazard, its words and its two events

PTX ISA 8 (memory consistency model), 8.1.3 and 9.7.13.4 (proxies), 9.7.13.15 (mbarrier),
9.7.15.7 (wgmma.fence, wait_group); 9.4: 9.7.18.6 (order of tcgen05).
"""

from .clocks import mbarrier_room
from .cluster import BarrierTrack, ClusterHazards
from .global_memory import Footprint, GlobalHazards
from .reports import Event
from .warp import WarpHazards

__all__ = [
    "BarrierTrack", "ClusterHazards", "Event", "Footprint", "GlobalHazards", "WarpHazards",
    "mbarrier_room",
]  # fmt: skip
