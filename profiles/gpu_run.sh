#!/usr/bin/env bash
# One command for a machine with a GPU but without compiler, network or this project's packages.
#
#   on the machine that compiles:   bash profiles/gpu_run.sh pack [NAME=DIR...]
#   on the machine with the GPU:    bash profiles/gpu_run.sh PART...
#
# `pack` gathers the built variants (build/variants) into build/carry/variants.tar.xz; take along
# the repository, build/carry, .whl (wheels: apache-tvm-ffi) and .peers (the peers' libraries).
# Each NAME=DIR packs the host package and the built variants of another checkout; there it is the
# folder build/checkouts/NAME, so `snapmla@build/checkouts/NAME` is a backend of profiles.bench.
#
# PART is one of
#   info                       device, driver, Python, packages, variants
#   bench:PRESET[@BACKENDS]    a preset of profiles.bench (bench:h200-table@snapmla,flashmla_fp8)
#   shape:LABEL[@BACKENDS]     a single row (shape:b32_L16384_h64_q1)
#   check[:ARG,ARG...]         tests/gpu/check_decode.py ARG ARG... (check:--full wants both limits
#                              below at 960 or more: its own budget is then 900 s)
#   tests[:FILE,FILE...]       the tests marked gpu, of all or of these files; gpu-tests-CARD.md is
#                              the record (profiles.test_record); SGLang's take build/sglang along
#                              (python -m tests.support.carry_sglang makes it); runs of parts of
#                              the files are one record by profiles.test_record join
#   profile:VARIANT[,VARIANT]  Nsight Compute on variants, as one table (profiles.ncu)
#   sanitizer[:ARG,ARG...]     memcheck, synccheck and racecheck over every op (profiles.sanitizer run
#                              ARG ARG...), to sanitizer-CARD.md; wants PART_LIMIT=540; the same
#                              OUT again goes on where the time was up
#   cost                       Nsight Compute's counters beside which the software GPU's cost is held
#                              (profiles.record_cost), to cost-h200.json
#   host[:ARG,ARG...]          host time of eager calls (profiles.host_time ARG ARG...)
#   old-new:--old,DIR[,ARG...]  the tables' shapes of an older packed checkout and of this one in turn
#                              (profiles.old_new ARG...; old-new:--old,build/checkouts/base,--rows,
#                              dense+topk some of them; old-new:--witness what a witness costs)
#   flashmla-suites:--suite,DIR[,ARG...]  FlashMLA's own sparse suites, a sample of their cases, on
#                              our kernels (profiles.flashmla_suites says what DIR holds)
#   table:NAME[,ARG,ARG...]    a table of profiles.tables (python -m profiles.bench NAME ARG...):
#                              table:sparse_v4_cost,--first,3; table:append_cost,--set,
#                              against=build/checkouts/NAME beside a packed checkout; DEEP_GEMM=DIR
#                              for the indexer's.  Before pack, python -m codegen build of
#                              prologue_cost: append_index_k_xbf16_ii64_neox_layer_sm90a
#                              sparse_v4_cost, sparse_528_cost: sparse_decode_mix16_rR_obf16_kvF_sm90a,
#                              R of 64, 32, 16, F of fp8_v4; fp8_nope, fp8_v41_planar, fp8_v41_rows
#                              sparse_prefill_cost: sparse_prefill_rR_dD_sm90a, R of 64, 32, 16,
#                              D of 576, 512
#                              mha_cost: mha_items_sm90a, mha_fwd_dX_dbf16_sm90a, X of 192, 128, 256
#   layers[:ARG,ARG...]        a step of 61 layers of DeepSeek-V3.2's attention in one graph, beside
#                              vLLM's operators and an older checkout (profiles.v32_step_cost;
#                              layers:--old,build/checkouts/base; DEEP_GEMM=DIR); before pack:
#                              python -m codegen build append_index_k_xbf16_ii64_neox_layer_sm90a,
#                              in the older checkout, too
#   parallel[:ARG,ARG...]      context-parallel decode over two and more GPUs (profiles.parallel_cost
#                              ARG ARG...); its tests are tests:tests/gpu/test_parallel.py
#   stamps[:SHAPE,SHAPE...]    times of a CTA's events, from stamped builds (profiles.stamps has
#                              the commands that build them, before pack)
#   engine:accuracy|speed      vLLM with the plugin beside its own backends; takes build/vllm along
#                              (profiles.engine bring makes it; VLLM_PACKED=DIR is another folder),
#                              where no vLLM is installed
#   engine:chunk               a chunk of prefill over a cached prefix, ours and FlashAttention's
#   engine:sparse|sparse-deep  the same of DSA models (DeepSeek-V3.2) of 4 and of 27 layers, with
#                              nvcc, as its indexer's peer compiles there; go on with it: a second
#                              call on the same machine runs what is left, and
#                              engine:sparse-deep,--timing,8x131072 one shape (32x32768 the other)
#   engine:sparse-old-new,--old,DIR  steps of 27 layers with an older packed checkout and this one
#   engine:sparse-switch[,--old,DIR]  steps of 27 layers by FlashMLA's names and by the backend, in turn
#   engine:v4                  V4's attention class of vLLM in a CUDA graph, ours beside FlashMLA
#   engine:v4-call             what of that class differs from the names' own calls, one at a time
#   engine:mtp                 how many drafts of a model's own draft layer are taken, ours and its own
#   engine:sparse-why          which tensor of a request differs alone and in a batch
#   record                     what the software GPU replays, to $OUT/softgpu_h200.npz; before pack's
#                              files leave: python -m profiles.record_softgpu hashes
#   demo                       make demo's job
#   prove[:JOBS]               schedules and mutants of make prove on this machine's cores, to
#                              $OUT/prove.json; before pack's files leave:
#                              python -m profiles.prove_away pack
#
# Environment, all optional: OUT (results; default build/gpu), PART_LIMIT and TOTAL_LIMIT (seconds
# a part and all parts may take; 300, 540), SNAPMLA_COMMIT (the commit, where there is no .git),
# BENCH_OPTIONS (more options of profiles.bench, such as "--quick"), WHEELS (.whl), PYTHON.
#
# $OUT/run.log is everything printed, $OUT/results.tgz all reports and logs; it is renewed after
# every part, so if it is interrupted, what was finished is there.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-build/gpu}
part_limit=${PART_LIMIT:-300}
total_limit=${TOTAL_LIMIT:-540}
carry=build/carry

# Packs another checkout: what its host package needs, and what it has built.
pack_checkout() {
    local name=$1 folder=$2 scratch
    if [ ! -d "$folder/build/variants" ]; then
        echo "pack: no built variants in $folder/build/variants" >&2
        exit 1
    fi
    mkdir -p "$carry/checkouts"
    scratch=$(mktemp -d)
    git -C "$folder" rev-parse HEAD > "$scratch/commit" 2>/dev/null ||
        cp "$folder/commit" "$scratch/commit"
    (
        cd "$folder" || exit 1
        tar -cf - --exclude=__pycache__ snapmla dsl_kernels softgpu codegen \
            -C "$scratch" commit -C "$folder" \
            $(find build/variants -name '*.so' -o -name '*.json' -path '*_sm*')
    ) | xz -T1 --lzma2=preset=1,dict=64MiB > "$carry/checkouts/$name.tar.xz.partial"
    mv "$carry/checkouts/$name.tar.xz.partial" "$carry/checkouts/$name.tar.xz"
    rm -r "$scratch"
}

pack() {
    mkdir -p "$carry"
    rm -rf "$carry/checkouts"
    local list other
    for other in "$@"; do pack_checkout "${other%%=*}" "$(realpath "${other#*=}")"; done
    list=$(cd build/variants && ls -- *.so *.json 2>/dev/null)
    if [ -z "$list" ]; then
        echo "pack: no built variants in build/variants; run: make precompile" >&2
        exit 1
    fi
    # The libraries of a family differ little: a wide window finds that.
    (cd build/variants && tar -cf - -- *.so *.json) | xz -T1 --lzma2=preset=1,dict=64MiB \
        > "$carry/variants.tar.xz.partial"
    mv "$carry/variants.tar.xz.partial" "$carry/variants.tar.xz"
    git rev-parse HEAD > "$carry/commit" 2>/dev/null || true
    git diff --quiet HEAD -- 2>/dev/null || sed -i 's/$/-dirty/' "$carry/commit"
    ls -lR "$carry"
}

setup() {
    site=$(mktemp -d)
    local wheel
    for wheel in "${WHEELS:-.whl}"/*.whl; do
        [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$site"
    done
    export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    export SNAPMLA_NO_JIT=${SNAPMLA_NO_JIT:-1}
    if [ -z "${SNAPMLA_VARIANT_DIR:-}" ]; then
        if [ -e "$carry/variants.tar.xz" ]; then
            SNAPMLA_VARIANT_DIR=$(mktemp -d)
            "$python" -m tarfile -e "$carry/variants.tar.xz" "$SNAPMLA_VARIANT_DIR"
        else
            SNAPMLA_VARIANT_DIR=$PWD/build/variants
        fi
    fi
    export SNAPMLA_VARIANT_DIR
    local packed name
    for packed in "$carry"/checkouts/*.tar.xz; do
        [ -e "$packed" ] || continue
        name=$(basename "$packed" .tar.xz)
        mkdir -p "build/checkouts/$name"
        "$python" -m tarfile -e "$packed" "build/checkouts/$name"
    done
    if [ -z "${SNAPMLA_PEERS:-}" ] && [ -d .peers ]; then
        export SNAPMLA_PEERS=$PWD/.peers
    fi
    if [ -z "${SNAPMLA_COMMIT:-}" ] && [ -e "$carry/commit" ]; then
        SNAPMLA_COMMIT=$(cat "$carry/commit")
        export SNAPMLA_COMMIT
    fi
}

info() {
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,temperature.gpu \
        --format=csv,noheader
    echo "variants: $(find "$SNAPMLA_VARIANT_DIR" -name '*.so' | wc -l) in $SNAPMLA_VARIANT_DIR"
    "$python" - <<'PY'
import importlib
for name in ("torch", "triton", "tvm_ffi", "typer", "pynvml", "snapmla"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "there"))
    except Exception as error:
        print(name, "MISSING:", error)
PY
}

# vLLM and what it imports, unpacked once, on the module path.
engine_site() {
    local begin=$SECONDS wheel packed=${VLLM_PACKED:-build/vllm}
    if [ -z "${engine_path:-}" ] && [ -d "$packed" ]; then
        engine_path=$(mktemp -d)
        "$python" -m tarfile -e "$packed"/vllm.tar.xz "$engine_path" 2>/dev/null &
        for wheel in "$packed"/whl/*.whl; do "$python" -m zipfile -e "$wheel" "$engine_path" & done
        wait
        cp -r "$packed"/snapmla-0.dist-info "$engine_path"
        export PYTHONPATH="$engine_path:$PYTHONPATH" VLLM_CACHE_ROOT="$engine_path/cache"
    fi
    "$python" -c "import importlib.metadata as m; print('vLLM', m.version('vllm'))" &&
        echo "on the path in $((SECONDS - begin)) s"
}

# SGLang and what it imports, unpacked once, where its tests look for them.
sglang_site() {
    [ -z "${SNAPMLA_SGLANG:-}" ] && [ -d build/sglang ] || return 0
    local packed
    SNAPMLA_SGLANG=$(mktemp -d)
    export SNAPMLA_SGLANG
    for packed in build/sglang/*.tar.xz; do
        "$python" -m tarfile -e "$packed" "$SNAPMLA_SGLANG/$(basename "$packed" .tar.xz)" &
    done
    wait
}

# The limit of the next part: what is left of TOTAL_LIMIT, at most PART_LIMIT.
limit() {
    local left=$((total_limit - SECONDS))
    echo $((left < part_limit ? left : part_limit))
}

run_part() {
    local part=$1 seconds=$2 kind rest what backends=()
    kind=${part%%:*}
    rest=${part#"$kind"}
    rest=${rest#:}
    what=${rest%%@*}
    [ "$rest" != "$what" ] && backends=(--backends "${rest#*@}")
    local bench=(timeout -k 10 "$seconds" "$python" -m profiles.bench --out "$work"
        --time-limit $((seconds - 20)) "${backends[@]}")
    # shellcheck disable=SC2086  # BENCH_OPTIONS is a list of words
    case $kind in
        info) timeout "$seconds" bash -c "$(declare -f info); python='$python' info" ;;
        bench) "${bench[@]}" ${BENCH_OPTIONS:-} "$what" ;;
        shape) "${bench[@]}" ${BENCH_OPTIONS:-} --shape "$what" ;;
        check)
            # reports join the others in $work
            timeout -k 10 "$seconds" "$python" tests/gpu/check_decode.py --out "$work" \
                ${what//,/ } 2>&1 |
                tee "$work/check-${what//[^A-Za-z0-9]/_}.log"
            ;;
        tests)
            local files=${what//,/ }
            sglang_site
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m pytest -q -m gpu -p no:cacheprovider \
                --junitxml "$work/tests.xml" ${files:-tests} 2>&1 | tee "$work/tests.log"
            local code=${PIPESTATUS[0]}
            "$python" -m profiles.test_record page "$work/tests.xml" --part "$part" --out "$work"
            return "$code"
            ;;
        profile)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.ncu --out "$work/ncu" ${what//,/ }
            ;;
        sanitizer)
            # what was finished stays in $out for the next call
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.sanitizer run --out "$out/sanitizer" \
                --limit $((seconds - 40)) ${what//,/ }
            local code=$?
            cp -r "$out/sanitizer" "$work/sanitizer"
            cp "$out"/sanitizer/sanitizer-*.md "$out" 2>/dev/null
            return "$code"
            ;;
        cost) timeout -k 10 "$seconds" "$python" -m profiles.record_cost record --out "$work" ;;
        host)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.host_time --out "$work" ${what//,/ }
            ;;
        old-new)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.old_new --out "$work" \
                --limit $((seconds - 15)) ${what//,/ }
            ;;
        flashmla-suites)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.flashmla_suites --out "$work" \
                --limit $((seconds - 40)) ${what//,/ }
            ;;
        table)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.bench ${what//,/ } --out "$work" \
                --time-limit $((seconds - 15))
            ;;
        layers)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.v32_step_cost --peers .peers \
                --out "$work" ${what//,/ }
            ;;
        parallel)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.parallel_cost --out "$work" \
                --seconds $((seconds - 60)) ${what//,/ } 2>&1 | tee "$work/parallel.log"
            return "${PIPESTATUS[0]}"
            ;;
        stamps)
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.stamps --out "$work" ${what//,/ }
            ;;
        record)
            timeout -k 10 "$seconds" "$python" -m profiles.record_softgpu record \
                --out "$out/softgpu_h200.npz" 2>&1 | tee "$work/record.log"
            return "${PIPESTATUS[0]}"
            ;;
        prove)
            "$python" -m profiles.prove_away run --jobs "${what:-$(nproc)}" \
                --limit "$((seconds - 10))" --out "$out/prove.json" 2>&1 | tee "$work/prove.log"
            return "${PIPESTATUS[0]}"
            ;;
        demo) timeout -k 10 "$seconds" "$python" -m profiles.demo 2>&1 | tee "$work/demo.log" ;;
        engine)
            engine_site || return 1
            # V4's class is called in this process: no folder for logs of others, no limit
            local own=(--work build/engine --limit $((seconds - 60)))
            case $what in v4*) own=() ;; esac
            # shellcheck disable=SC2086  # a list of words
            timeout -k 10 "$seconds" "$python" -m profiles.engine ${what//,/ } "${own[@]}" \
                --out "$work/engine" 2>&1 |
                tee "$work/engine-${what//[^A-Za-z0-9]/_}.log"
            local code=${PIPESTATUS[0]}
            mkdir -p "$work/engine"
            cp build/engine/*.log build/engine/*-*.json "$work/engine" 2>/dev/null
            return "$code"
            ;;
        *)
            echo "part: '$part' is none; \`bash profiles/gpu_run.sh\` lists those that there are"
            return 2
            ;;
    esac
}

main() {
    mkdir -p "$out"
    work=$(mktemp -d)
    setup
    local part seconds code verdicts=() failed=0
    for part in "$@"; do
        seconds=$(limit)
        if [ "$seconds" -lt 30 ]; then
            verdicts+=("$part: not run, the $total_limit s are spent")
            failed=1
            continue
        fi
        echo "=== $part (at most $seconds s)"
        local begin=$SECONDS
        run_part "$part" "$seconds"
        code=$?
        [ "$code" -ne 0 ] && failed=1
        verdicts+=("$part: exit $code, $((SECONDS - begin)) s")
        tar -czf "$out/results.tgz.partial" -C "$work" . &&
            mv "$out/results.tgz.partial" "$out/results.tgz"
    done
    echo
    echo "=== results"
    local reports=()
    for part in "$work"/*.json; do [ -e "$part" ] && reports+=("$part"); done
    [ ${#reports[@]} -gt 0 ] && "$python" -m profiles.report "${reports[@]}"
    printf '%s\n' "${verdicts[@]}"
    return $failed
}

if [ $# -eq 0 ]; then
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
fi
if [ "$1" = pack ]; then
    shift
    pack "$@"
    exit
fi
mkdir -p "$out"
main "$@" 2>&1 | tee "$out/run.log"
exit "${PIPESTATUS[0]}"
