"""vLLM with snapmla's plugin on a GPU: accuracy and speed beside vLLM's own MLA backends.

    python -m profiles.engine bring                where there is a network: build/vllm, ~50 MB
    bash profiles/gpu_run.sh engine:accuracy engine:speed    where there is a GPU; no network
    bash profiles/gpu_run.sh engine:sparse engine:sparse-deep      the same of sparse attention
    bash profiles/gpu_run.sh engine:chunk engine:sparse-why        chunked prefill; batch invariance
    python -m profiles.engine gates                the acceptance, from the committed JSON

``bring`` packs a release of vLLM without what an sm_90 device cannot run; ``case`` is one engine
in a process of its own; ``truth`` and ``v32`` are the models in torch; ``study`` says which cases
there are and reads their results.  ``chunk`` and ``why`` are studies of their own.
"""
