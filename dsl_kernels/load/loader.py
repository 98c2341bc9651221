"""The seam between what fills a decode kernel's KV ring and what reads it: a *loader*.

A loader is an object with the members of ``Loader``; it inherits nothing.  ``PagedTma``
(paged_tma.py) loads pages of a block table by TMA; another one may gather rows by index.

Contract.  A stage is readable when its full barrier flips, whoever arrives there: TMA with its
bytes, or a warp of the loader's behind its proxy fence (bytes of ``cp.async`` and of ordinary
stores are not seen by WGMMA and TMA before one).  By then every place of the tile in front of the
sequence's end (``WorkList.seqlen_of``) that is no token has been made harmless, a row of zeros with
scale 0 for instance, whose logit is -inf: readers do not ask what a place holds.  Places from the
sequence's end on may be anything; readers know where it is, mask their logits and clear their V.

Who is who.  The loader owns the producer warpgroup, of which it takes the first ``warps`` warps.
Q is not its own: it calls ``tile_of_q`` (q_tiles.py) once for each work tile, in their order, by
all lanes of one warp of its choice.  That waits for a free stage of Q: a warp that also fills the
KV ring had better fill it with the work tile's tiles first, where Q has one stage.  ``on_full`` is
what one of its warps does about every stage that is full, before it looks at the next one; this may
be the warp that announces the stage.

Room that a loader has beside the FP8 pipelines on SM90:

    registers a thread     etap, 64 rows and more: 32 of 32 / 112 / 2 x 184 (producers, softmax,
                           P.V), all 65536 of the SM; more for it is less for P.V, which spills
                           at 176.  etap, 32 rows and fewer: 40 of 40 / 120 / 2 x 160.
                           dual_wg: 24
    warps                  4: etap with 64 rows uses 3 of PagedTma's (KV, Q, scales), with 32 and
                           fewer 2 (KV, Q); warp 3 idles
    shared memory, bytes   of 232448: 220160 are taken in etap with 64 rows, so 12288 are left for
                           barriers (16 a stage and Ring) and tables; a stage is 41216
    named barriers         4 and on (Barrier in sm90/roles.py has 1 to 3), 0 is the whole CTA's

The tiles themselves, ``k<plane>`` and the field of scales, are in the kernel's plan of shared
memory, among Q, P and what else has to begin at a multiple of the swizzle's period.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from ..blocks import budget as bud
from .work_list import Call, Work

Readers = dict[str, int]  # role -> warps of a CTA that free a stage


class Cache(NamedTuple):
    """The cache as a loader's warps are given it.

    Attributes:
        source: what ``Loader.source`` made of its planes.
        pages: how many there are.
        scale: (pages, P) fp32 of the tokens; None without.
        kv_heads: divisor by their number where the cache has several: sequence i reads head
            i % heads; None where a page has none.
    """

    source: tuple
    pages: Int32
    scale: Any = None
    kv_heads: Any = None


class Feed(NamedTuple):
    """Arguments of a loader's roles (``Loader.run``).

    Attributes:
        st: shared memory.
        layouts: of the ring's tiles, plane by plane.
        k_pipe: what ``Loader.pipe`` returned.
        cache: where tokens come from.
        work, call, part: the work list, scalars, and whose work tiles are loaded.
        mark: ``mark(is_first)`` is run behind each tile's copies; None without.
    """

    st: Any
    layouts: tuple
    k_pipe: Any
    cache: Cache
    work: Work
    call: Call
    part: Any
    mark: Callable | None = None


class Loader(Protocol):
    """Protocol of a loader: the members that a kernel uses.

    Attributes:
        stages: of the KV ring.
        warps: of the producer warpgroup that ``run`` expects, ``on_full`` included.
    """

    stages: int
    warps: int

    @property
    def fields(self) -> dict:
        """Shared memory of its own: barriers, tables."""

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """Barriers of the loader in a budget, those of the KV ring first."""

    def source(self, tensors: tuple, layouts: tuple) -> tuple:
        """Host half: return what the kernel gets for the cache's planes."""

    def descriptors(self, source: tuple) -> tuple:
        """Copy atoms of ``source`` whose tensor maps should be prefetched."""

    def init(self, st: Any) -> None:
        """Initialise the loader's barriers beside the KV ring's; one thread calls this, before
        ``pipe``."""

    def pipe(self, st: Any) -> Any:
        """The KV ring, as readers wait for and release its stages; by all threads of the CTA.  Its
        fence and barrier publish every mbarrier initialised so far."""

    def run(self, warp: Any, feed: Feed, tile_of_q: Any, on_full: Any) -> None:
        """The role of one warp, from the part's first work tile to its last; then, when its last
        tile has been asked for, the next kernel may be launched.

        ``tile_of_q(i, batch, stage)`` brings the row tile of work tile ``i``, of sequence
        ``batch``, to ``stage`` (a producer's state of the ring that Q passes through): waits until
        it is free and issues the copies, whose bytes complete the stage's barrier.  None without Q.
        ``on_full(stage)``: see above; None without.
        """


def ring_pipe(
    barriers, stages: int, readers: Readers, tx_bytes: int, cluster: int = 1,
    defer_sync: bool = False,
):  # fmt: skip
    """A ring of tiles over its barriers in shared memory; the KV ring for ``Loader.pipe``.

    One arrival fills a stage, with ``tx_bytes`` if its filler acquires it (``producer_acquire``);
    one lane of each reading warp of the cluster frees it.

    Args:
        defer_sync: whether the fence and barrier of a ring made later publish its barriers.
    """
    group = lambda n: pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
    options = {}
    if cluster > 1:
        options = dict(cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)), mcast_mode_mn=(0, 1))
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(), num_stages=stages, producer_group=group(1),
        consumer_group=group(sum(readers.values()) * cluster), tx_count=tx_bytes,
        defer_sync=defer_sync, **options,
    )  # fmt: skip


def ring_barriers(
    name: str, stages: int, filler: str, readers: Readers, cluster: int = 1
) -> tuple[bud.Barrier, ...]:
    """A ring of tiles in a budget: ``filler`` arrives once; a peer's warps free a stage, too."""
    free = {role: n * cluster for role, n in readers.items()}
    return (
        bud.Barrier(f"{name}_full", 1, {filler: 1}, stages),
        bud.Barrier(f"{name}_empty", sum(free.values()), free, stages),
    )
