"""SGLang's multi-head latent attention on snapmla's kernels, as a plugin.

``register`` is the entry point (group ``sglang.srt.plugins``), which SGLang calls in each of its
processes; nothing of SGLang is imported before.  Then::

    python -m sglang.launch_server --model-path MODEL --attention-backend snapmla \\
        --kv-cache-dtype fp8_e4m3

A server that does not ask for this backend runs as if the plugin were not there.  Prompts are
computed as multi-head attention by SGLang's own ``fa3`` (``fa4`` on SM100), which this backend
calls.

Models that SGLang decodes by FlashMLA (DeepSeek-V4, V3.2, GLM-5, dense ones by ``flashmla``) are
reached another way, which changes nothing but kernels (``flashmla.py``)::

    SNAPMLA_SGLANG_FLASHMLA=1 python -m sglang.launch_server --model-path MODEL

``python -m snapmla.integrations.sglang check`` says whether this installation will work.
"""

from __future__ import annotations

from snapmla.integrations.sglang.refuse import BACKEND

__all__ = ["BACKEND", "register"]


def register() -> None:
    """Makes the backend known to SGLang; may be called again.

    Registers its name, and hooks that SGLang applies after all plugins are loaded
    (``snapmla/integrations/sglang/hooks.py``); with ``SNAPMLA_SGLANG_FLASHMLA`` those of
    FlashMLA's names, too, in releases that are known.
    """
    from snapmla.integrations.sglang import hooks

    hooks.register()
