#!/bin/sh
# Compiles decode.c against an unpacked bundle.  usage: build.sh BUNDLE PROGRAM
# CC and PYTHON may name other executables; PYTHON has apache-tvm-ffi, the C side needs its library.
set -eu
bundle=${1:?usage: build.sh BUNDLE PROGRAM} program=${2:?usage: build.sh BUNDLE PROGRAM}
config() { "${PYTHON:-python3}" -m tvm_ffi.config "$1"; }
kernels=$(cd "$bundle/snapmla/variants" && pwd)
exec "${CC:-gcc}" -std=c99 -O2 -Wall -Wextra -Werror -o "$program" "$(dirname "$0")/decode.c" \
    -I"$bundle/include/snapmla" -I"$(config --includedir)" -I"$(config --dlpack-includedir)" \
    "$kernels/append_kv_xbf16_ii32_sm90a.so" "$kernels/plan_decode_sm90a.so" \
    "$kernels/decode_etap_r16_p64_obf16_sm90a.so" \
    -L"$(config --libdir)" -Wl,--no-as-needed -ltvm_ffi -ldl -lm \
    -Wl,-rpath,"$kernels" -Wl,-rpath,"$(config --libdir)"
