#!/usr/bin/env bash
# Check the Arm kernels without a board: an arm64 CPython and Numba under qemu-user, from Debian's and PyPI's packages.
#
#   scripts/arm_check.sh            build what is missing (.arm/, once, some minutes), then check
#   scripts/arm_check.sh kernels    only what takes a minute: 1 and 2
#   scripts/arm_check.sh greedy     and what takes some minutes: 3
#   scripts/arm_check.sh python …   run a program there instead (as a Cortex-A76)
#
# 1. Every kernel, compiled here for a Cortex-A76 and for a Cortex-A72, which has no dot product, and run there: it must write what it writes
# here, to the bit. 2. The kernels' assembly holds `sdot` on the first and none on the second. 3. A greedy run of the tiny checkpoint here and
# on both, its steps compiled here: tokens, integers and floats must be the same. 4. The kernel tests as a Cortex-A76, compiled there, which
# takes long.
# Emulation says nothing about speed: scripts/a76_model.py does, on paper. Needs an x86 machine with AVX2, apt-get, dpkg and a Python 3.11 with the packages of setup.cfg
# ($PYTHON, else the checkout's .venv, else python3); no root. ARM_FOLDER moves .arm, DEBIAN_MIRROR names another mirror.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
FOLDER=${ARM_FOLDER:-$PWD/.arm}
ROOT=$FOLDER/root
SITE=$ROOT/site
RELEASE=bookworm
ARM_PYTHON=3.11
ARM_PYTHON_TUPLE="3, 11"
ARM_PACKAGES="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1
  libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1"
HOST_PACKAGES="qemu-user-static binutils-aarch64-linux-gnu binutils-common libbinutils libjansson4 libzstd1 zlib1g"
KERNELS=(gemv_q4 gemm_q4 gemm_q8fast gemm_q8 scores_q8 values_q8 scores_q5 values_q4 scores_plane look_plane)
TESTS="tests/test_simd.py tests/test_linear.py tests/test_attention.py"

say() { printf '%s\n' "$*" >&2; }

# debs ARCH FOLDER PACKAGE…: unpack Debian packages into FOLDER, with package lists of their own (the system's stay as they are)
debs() {
  local arch=$1 into=$2 apt=$FOLDER/apt-$1
  shift 2
  mkdir -p "$apt"/{lists/partial,cache/archives/partial,etc} "$into" "$FOLDER/debs-$arch"
  : >"$apt/status"
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$keyring] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} $RELEASE main" >"$apt/etc/sources.list"
  local options=(-qq -o "APT::Architecture=$arch" -o "APT::Architectures::=$arch" -o "Dir::State=$apt" -o "Dir::State::status=$apt/status"
    -o "Dir::Cache=$apt/cache" -o "Dir::Etc::sourcelist=$apt/etc/sources.list" -o "Dir::Etc::sourceparts=$apt/none" -o "APT::Sandbox::User=")
  apt-get "${options[@]}" update >&2
  (cd "$FOLDER/debs-$arch" && apt-get "${options[@]}" download "$@" >&2 && for deb in *.deb; do dpkg -x "$deb" "$into"; done)
}

requirements() { # what qwenc needs, and what its tests do
  "$PYTHON" - <<'PY'
import configparser
setup = configparser.ConfigParser()
setup.read("setup.cfg")
print(setup["options"]["install_requires"] + setup["options.extras_require"]["test"])
PY
}

build() {
  local wanted
  wanted=$(sha256sum <<<"$RELEASE $ARM_PYTHON $ARM_PACKAGES $HOST_PACKAGES $(requirements)")
  [[ "$(cat "$FOLDER/complete" 2>/dev/null)" == "$wanted" ]] && return
  for tool in apt-get dpkg sha256sum; do
    command -v "$tool" >/dev/null || { say "arm_check: needs $tool (Debian or Ubuntu)"; exit 1; }
  done
  [[ -r /usr/share/keyrings/debian-archive-keyring.gpg ]] || { say "arm_check: needs the package debian-archive-keyring"; exit 1; }
  say "arm_check: building $FOLDER"
  rm -rf "$FOLDER"
  mkdir -p "$ROOT"
  # shellcheck disable=SC2086
  debs "$(dpkg --print-architecture)" "$FOLDER/host" $HOST_PACKAGES
  # shellcheck disable=SC2086
  debs arm64 "$ROOT" $ARM_PACKAGES
  say "arm_check: Python packages"
  requirements >"$FOLDER/requirements.txt"
  # shellcheck disable=SC2046
  "$PYTHON" -m pip install -q --disable-pip-version-check --target "$SITE" --only-binary=:all: --implementation cp \
    --python-version "$ARM_PYTHON" $(for v in 17 24 28 31 34; do echo "--platform manylinux_2_${v}_aarch64"; done) \
    --platform manylinux2014_aarch64 -r "$FOLDER/requirements.txt"
  rm -rf "$FOLDER"/apt-* "$FOLDER"/debs-* # unpacked
  find "$FOLDER/host" -name 'qemu-*' ! -name qemu-aarch64-static -type f -delete
  printf '%s\n' "$wanted" >"$FOLDER/complete"
}

# arm CPU MACHINE COMMAND…: Python COMMAND as that CPU. /proc/cpuinfo and /sys are those of a recorded board (tests/data/machines), so that
# qwenc, Numba and LLVM find out for themselves what the CPU can do, as they do there.
arm() {
  local cpu=$1 machine=$2
  local prefix=$FOLDER/$machine
  shift 2
  if [[ ! -e $prefix/usr ]]; then
    mkdir -p "$prefix"
    "$PYTHON" tests/machines.py "$prefix" "$machine"
    for part in etc lib usr; do ln -s "$ROOT/$part" "$prefix/$part"; done
  fi
  env -u NUMBA_CPU_NAME -u NUMBA_CPU_FEATURES -u QWENC_SIMD PYTHONHOME="$ROOT/usr" PYTHONPATH="$PWD:$SITE" PYTHONDONTWRITEBYTECODE=1 \
    QWENC_CACHE="$FOLDER/cache" HF_HUB_OFFLINE=1 \
    "$FOLDER/host/usr/bin/qemu-aarch64-static" -cpu "$cpu" -L "$prefix" "$ROOT/usr/bin/python$ARM_PYTHON" "$@"
}
a76() { arm cortex-a76 rk3588 "$@"; }
a72() { arm cortex-a72 raspberry-pi-4 "$@"; }

fail() { say "arm_check: FAILED: $*"; exit 1; }

# dot_products FILE: per kernel of scripts/kernel_asm.py its name and how many sdot it holds
dot_products() { awk '/^# kernel/ { name = $3; count[name] = 0 } $1 == "sdot" { count[name]++ } END { for (k in count) print k, count[k] }' "$1" | sort; }

"$PYTHON" -c "import sys; sys.exit(sys.version_info[:2] != ($ARM_PYTHON_TUPLE))" || fail "$PYTHON is no Python $ARM_PYTHON, for which the steps are compiled"
build
if [[ "${1:-}" == python ]]; then
  shift
  a76 "$@"
  exit
fi
RESULTS=$FOLDER/results
mkdir -p "$RESULTS"

# kernels CPU MACHINE: compile them here, run them there, compare
kernels() {
  local folder=$RESULTS/kernels-$1
  rm -rf "$folder"
  "$PYTHON" scripts/arm_kernels.py build "$folder" --cpu "$1"
  for arguments in "$folder"/*.args; do
    local name=${arguments%.args} libraries
    libraries=$(printf '%s:' "$FOLDER"/host/usr/lib/*-linux-gnu)
    LD_LIBRARY_PATH=$libraries "$FOLDER/host/usr/bin/aarch64-linux-gnu-ld" -shared -o "$name.so" "$name.o" "$name.stubs.o"
  done
  arm "$1" "$2" scripts/arm_kernels.py run "$folder"
  QWENC_SIMD=plain NUMBA_CACHE_DIR=/dev/null "$PYTHON" scripts/arm_kernels.py compare "$folder" >&2
}

say "arm_check: every kernel, compiled here and run as a Cortex-A76"
kernels cortex-a76 rk3588 || fail "a kernel differs on a Cortex-A76"
say "arm_check: every kernel, compiled here and run as a Cortex-A72"
kernels cortex-a72 raspberry-pi-4 || fail "a kernel differs on a Cortex-A72"

say "arm_check: the dot product in the assembly"
for cpu in a76 a72; do "$PYTHON" scripts/kernel_asm.py "${KERNELS[@]}" --cpu "cortex-$cpu" >"$RESULTS/$cpu.s"; done
dot_products "$RESULTS/a76.s" >&2
[[ $(dot_products "$RESULTS/a76.s" | awk '$2 > 0' | wc -l) == "${#KERNELS[@]}" ]] || fail "a kernel without sdot on a Cortex-A76"
[[ $(dot_products "$RESULTS/a72.s" | awk '$2 > 0' | wc -l) == 0 ]] || fail "sdot on a Cortex-A72, which has none"
[[ "${1:-}" == kernels ]] && exit

# greedy CPU MACHINE: what the tiny checkpoint says as that CPU, with steps compiled here, into RESULTS/CPU
greedy() {
  local folder=$RESULTS/greedy-$1
  rm -rf "$folder"
  "$PYTHON" scripts/arm_greedy.py pack "$folder" >&2
  arm "$1" "$2" scripts/arm_greedy.py key "$folder"
  "$PYTHON" scripts/arm_greedy.py compile "$folder" --cpu "$1"
  NUMBA_CACHE_DIR=$folder/jit arm "$1" "$2" scripts/arm_greedy.py run "$folder" >"$RESULTS/$1" 2>"$RESULTS/$1.log" || { cat "$RESULTS/$1.log" >&2; fail "as a $1"; }
  grep -q "SIMD level $3" "$RESULTS/$1.log" || fail "a $1 does not take the level $3"
  grep -q compiles "$RESULTS/$1.log" && fail "a $1 compiles what was compiled for it"
  diff "$RESULTS/here" "$RESULTS/$1" >&2 || fail "a greedy run differs as a $1"
  say "arm_check: as a $1 the same"
}

say "arm_check: a greedy run of the tiny checkpoint here"
"$PYTHON" scripts/arm_greedy.py pack "$RESULTS/greedy" >&2
QWENC_CACHE="$FOLDER/host-cache" "$PYTHON" scripts/arm_greedy.py run "$RESULTS/greedy" >"$RESULTS/here" 2>"$RESULTS/here.log" || { cat "$RESULTS/here.log" >&2; fail "on this machine"; }
cat "$RESULTS/here" >&2
say "arm_check: the same run on two Arm CPUs"
greedy cortex-a76 rk3588 neon
greedy cortex-a72 raspberry-pi-4 plain
[[ "${1:-}" == greedy ]] && exit

say "arm_check: the kernel tests as a Cortex-A76"
# shellcheck disable=SC2086
a76 -m pytest -q -p no:cacheprovider $TESTS >"$RESULTS/tests.log" 2>&1 || { tail -n 30 "$RESULTS/tests.log" >&2; fail "a kernel test"; }
tail -n 1 "$RESULTS/tests.log" >&2
say "arm_check: passed"
