#!/usr/bin/env bash
# The first ten minutes on a real B200: do the kernels run, are they right, how fast are they?  No
# kernel of sm_100a has run on hardware before.
#
#   on the machine that compiles:  make precompile ARCH=sm_100a && bash profiles/gpu_run.sh pack
#   on the machine with the B200:  bash profiles/first_minutes_b200.sh
#   anywhere:                      bash profiles/first_minutes_b200.sh --list
#
# The repository, build/carry and .whl go along (profiles/gpu_run.sh says what they hold).  Steps go
# from what needs least to what needs most: the first that fails says where to look.  Each has a
# limit, so that a kernel that hangs costs its own step; later ones still run.  Results and logs are
# in $OUT (default build/b200), $OUT/steps.md is the table: bring all of it back.
#
# Environment, all optional: OUT, PYTHON (python3), STEPS (a regular expression of step names),
# SHAPES (of step `speed`, by commas), WHEELS (.whl).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-build/b200}
carry=build/carry
shapes=${SHAPES:-b32_L16384_h64_q1,b8_L32768_h16_q1,b128_L4096_h64_q1}
smallest=decode_ws_r64_p64_obf16_sm100a
listing= variants=
[ "${1:-}" = --list ] && listing=1

# name | seconds | what it shows | if it fails
steps() {
    cat <<'TABLE'
info|60|card, driver, Python, packages|WHEELS, PYTHON: nothing of ours ran yet
helpers|120|cache writers, readers, quantisers: no tensor cores, no tensor memory|launch shim, tensor maps, PDL: docs/troubleshooting.md
plans|120|planner, records, merge|the same, and cooperative reads of tables
indexer|120|index keys, their rows, top-k, logits, MHA's list|clusters and their barriers; `index_logits`: tcgen05
decode|120|small calls of every decode kernel, sparse ones too, judged by the software GPU's references|tcgen05, tensor memory, register counts: one variant under `memcheck`
memcheck|180|one decode kernel under compute-sanitizer|an address: its report names the instruction
tests|240|all tests that want a GPU|junit in tests.xml, gpu-tests-CARD.md
speed|180|a few shapes beside this card's own copy and GEMM rates|predictions: docs/lab-book.md
profile|120|counters of one decode kernel|ncu rights: docs/troubleshooting.md
TABLE
}

# A folder with the built variants whose names match, for steps that want only those.
only() {
    local folder
    folder=$(mktemp -d)
    find "$variants" -name '*_sm100a.*' | grep -E "/($1)" | xargs -r -I{} ln -s {} "$folder"
    echo "$folder"
}

# Tests that were skipped, for want of a card, are no success.
small_calls() {
    local folder report
    folder=$(only "$1")
    report=$(SNAPMLA_VARIANT_DIR=$folder ${2:-} "$python" -m pytest -q -m gpu \
        -p no:cacheprovider tests/gpu/test_workloads.py 2>&1)
    local code=$?
    echo "$report"
    [ $code = 0 ] && grep -q ' passed' <<< "$report"
}

part() {
    SNAPMLA_VARIANT_DIR=$variants PART_LIMIT=$seconds TOTAL_LIMIT=$seconds OUT=$out/$name \
        PYTHON=$python bash profiles/gpu_run.sh "$@"
}

run() {
    case $1 in
        info) part info ;;
        helpers) small_calls 'append_kv|quantize_q|fetch_dequant' ;;
        plans) small_calls 'plan_decode|plan_to_records|records_to_plan|merge' ;;
        indexer) small_calls 'append_index_k|dsa_prologue|index_rows|fetch_index_k|select_topk|index_logits|mha_' ;;
        decode) small_calls 'decode_|dense_decode|record_decode|sparse_' ;;
        memcheck) small_calls "$smallest" 'compute-sanitizer --tool memcheck --error-exitcode 9' ;;
        tests) part tests ;;
        speed)
            local shape
            for shape in ${shapes//,/ }; do part "shape:$shape@snapmla" || return; done
            ;;
        profile) part "profile:$smallest" ;;
    esac
}

prepare() {
    local wheel site
    mkdir -p "$out"
    site=$(mktemp -d)
    for wheel in "${WHEELS:-.whl}"/*.whl; do
        [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$site"
    done
    export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" SNAPMLA_NO_JIT=1
    variants=$PWD/build/variants
    if [ -e $carry/variants.tar.xz ]; then
        variants=$(mktemp -d)
        "$python" -m tarfile -e $carry/variants.tar.xz "$variants"
    fi
    printf '%s\n' '# First minutes on a B200' '' '| step | shows | exit | s |' '|---|---|---|---|' \
        > "$out/steps.md"
}

[ -n "$listing" ] || prepare
export -f run part small_calls only
export python out variants shapes smallest
failed=0
while IFS='|' read -r name seconds shows hint; do
    [[ $name =~ ${STEPS:-.} ]] || continue
    if [ -n "$listing" ]; then
        printf '%-9s %4s s  %s\n' "$name" "$seconds" "$shows"
        continue
    fi
    echo "=== $name: $shows"
    begin=$SECONDS
    export name seconds
    timeout -k 10 "$seconds" bash -c 'run "$name"' > "$out/$name.log" 2>&1 < /dev/null
    code=$?
    tail -n 4 "$out/$name.log"
    [ $code = 124 ] && echo "$name: stopped after $seconds s: a hang, or a limit too short"
    [ $code = 0 ] || { failed=1 && echo "$name: exit $code; look at $hint"; }
    echo "| $name | $shows | $code | $((SECONDS - begin)) |" >> "$out/steps.md"
done < <(steps)
[ -n "$listing" ] || { echo && cat "$out/steps.md"; }

exit $failed
