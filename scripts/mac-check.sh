#!/usr/bin/env bash
# Checks what only a Mac can show, once, in a clone of this repository. It prints one page: each step
# with its time and what was seen, and for a failure what it means and where to look. It builds and
# signs the program if needed. It has settings, state, VMs and a home of its own, and removes them.
#
#   scripts/mac-check.sh [--quick] [--limit SECONDS]
#
# --quick leaves out the VMs, for which about 1 GB is downloaded. --limit shortens the time that each
# step may take. The exit status is 0 if no step failed, 1 otherwise. The shell of macOS is bash 3.2.
set -u
cd "$(dirname "$0")/.." || exit 2

usage() {
  printf 'usage: mac-check.sh [--quick] [--limit SECONDS]\n' >&2
  exit 2
}
quick=
limit=
while [ $# -gt 0 ]; do
  case $1 in
  --quick) quick=yes ;;
  --limit)
    [ $# -ge 2 ] || usage
    limit=$2
    case $limit in '' | *[!0-9]*) usage ;; esac
    shift
    ;;
  *) usage ;;
  esac
  shift
done

# The sockets of a VM need a short path, and TMPDIR of a Mac is long.
base=${TMPDIR:-/tmp}
[ ${#base} -le 24 ] || base=/tmp
work=$(mktemp -d "${base%/}/asz-mac.XXXXXX") || exit 2
mkdir -p "$work/home" "$work/tmux" bin || exit 2
program=$PWD/bin/agent-sessionizer
log=$PWD/bin/mac-check.log
: >"$log" || exit 2
running= # the process group of the present step
vms=     # whether VMs may exist
passed=0
failed=0
skipped=0

# asz runs the program with nothing of the user's: neither settings, nor sessions, nor logins.
asz() {
  env -i HOME="$work/home" PATH="$PATH" USER="${USER:-}" LOGNAME="${LOGNAME:-}" TERM="${TERM:-dumb}" LANG="${LANG:-}" \
    HTTP_PROXY="${HTTP_PROXY:-}" HTTPS_PROXY="${HTTPS_PROXY:-}" NO_PROXY="${NO_PROXY:-}" \
    XDG_CONFIG_HOME="$work/config" XDG_STATE_HOME="$work/state" XDG_CACHE_HOME="$work/cache" XDG_DATA_HOME="$work/data" \
    AGENT_SESSIONIZER_LIMA_HOME="$work/vms" AGENT_SESSIONIZER_POOL="${pool:-1}" TMUX_TMPDIR="$work/tmux" "$program" "$@"
}
inside() { asz exec "$session" -- "$@"; }

# A step prints what it does. Its last line is what was seen.
pass() {
  printf '%s\n' "$*"
  exit 0
}
fail() {
  printf '%s\n' "$*"
  exit 1
}
skip() {
  printf '%s\n' "$*"
  exit 77
}
need_program() { [ -x "$program" ] || skip "the program was not built"; }

# bounded runs a step in a process group of its own, which is killed when its time is over.
bounded() { # SECONDS FUNCTION
  local most=$1 began=$SECONDS code
  shift
  set -m
  ("$@") >"$work/out" 2>&1 </dev/null &
  running=$!
  set +m
  while kill -0 "$running" 2>/dev/null; do
    if [ $((SECONDS - began)) -ge "$most" ]; then
      kill -TERM -- "-$running" 2>/dev/null
      sleep 1
      kill -KILL -- "-$running" 2>/dev/null
      wait "$running" 2>/dev/null
      running=
      return 124
    fi
    sleep 0.1
  done
  wait "$running" 2>/dev/null
  code=$?
  running=
  return "$code"
}

check() { # NAME SECONDS MEANING WHERE FUNCTION
  local name=$1 most=$2 means=$3 where=$4 began=$SECONDS code seen result
  [ -z "$limit" ] || [ "$limit" -ge "$most" ] || most=$limit
  bounded "$most" "$5"
  code=$?
  seen=$(grep -v '^[[:space:]]*$' "$work/out" | tail -n 1 | LC_ALL=C tr -d '\000-\037\177' | cut -c 1-160)
  case $code in
  0) result=PASS passed=$((passed + 1)) ;;
  77) result=SKIP skipped=$((skipped + 1)) ;;
  124) result=FAIL failed=$((failed + 1)) seen="stopped after $most s; last output: ${seen:-none}" ;;
  *) result=FAIL failed=$((failed + 1)) ;;
  esac
  printf '%s %5d s  %-24s %s\n' "$result" "$((SECONDS - began))" "$name" "${seen:-no output}"
  if [ "$result" = FAIL ]; then
    printf '%15smeans: %s\n%15ssee:   %s\n' '' "$means" '' "$where"
  fi
  {
    printf '=== %s: %s (status %d)\n' "$name" "$result" "$code"
    cat "$work/out"
  } >>"$log"
}

remove_all() {
  asz list --json | sed -n 's/^ *"name": *"\(agent-[^"]*\)".*/\1/p' | while read -r name; do
    asz destroy --force "$name"
  done
  pool=0 asz image prune
  TMUX_TMPDIR=$work/tmux tmux kill-server
  for pid in $(pgrep -f "$work/"); do # a keeper or host agent that is left names its directory
    kill -KILL "$pid"
  done
}

cleanup() {
  trap - EXIT
  trap '' INT TERM
  [ -z "$running" ] || kill -KILL -- "-$running" 2>/dev/null
  [ -z "$vms" ] || bounded 300 remove_all
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Without VMs.

system() {
  [ "$(uname -s)" = Darwin ] || fail "$(uname -s) is not macOS"
  version=$(sw_vers -productVersion) || fail "sw_vers failed"
  arch=$(uname -m)
  [ "${version%%.*}" -ge 13 ] || fail "macOS $version is older than 13"
  [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" != 1 ] || fail "macOS $version: this shell runs under Rosetta"
  [ "$(sysctl -n kern.hv_support)" = 1 ] || fail "macOS $version $arch: no hardware virtualization"
  pass "macOS $version $arch, $(sysctl -n hw.ncpu) CPUs, $(($(sysctl -n hw.memsize) >> 30)) GiB"
}

tools() {
  missing=
  for tool in git ssh ssh-keygen tmux go make npm; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
  done
  [ -z "$missing" ] || fail "missing:$missing"
  version=$(tmux -V | sed 's/^[^0-9]*//; s/[^0-9.].*//')
  major=${version%%.*}
  minor=${version#*.}
  { [ "${major:-0}" -gt 3 ] || { [ "${major:-0}" -eq 3 ] && [ "${minor%%.*}" -ge 2 ]; }; } || fail "tmux $version is older than 3.2"
  pass "$(git --version), tmux $version, $(go env GOVERSION)"
}

build() {
  if [ ! -x "$program" ] || [ -n "$(find cmd pkg lima provision config go.mod -newer "$program" -type f ! -path '*/node_modules/*' | head -n 1)" ]; then
    make build || fail "make build failed"
    how=built
  else
    how="already up to date"
  fi
  settings=$(go version -m "$program") || fail "go version -m cannot read the program"
  case $settings in
  *CGO_ENABLED=1*) ;;
  *) fail "built without cgo" ;;
  esac
  pass "$how: $("$program" version | head -n 1)"
}

entitled() { codesign -d --entitlements - "$program" 2>&1 | grep com.apple.security.virtualization; }
signature() {
  need_program
  how="already signed"
  if ! entitled; then
    codesign --force --sign - --entitlements vz.entitlements "$program" || fail "codesign failed"
    how="signed now"
    entitled || fail "codesign added no entitlement"
  fi
  codesign --verify --strict "$program" || fail "the signature is invalid"
  pass "$how, with com.apple.security.virtualization"
}

doctor() {
  need_program
  asz doctor || fail "doctor found problems: $(asz doctor 2>/dev/null | grep -c '✗')"
  pass "doctor found no problem"
}

# Some tests of the driver are about QEMU on Linux, or need its qemu-img.
unit_tests() {
  qemu='Accel|StateKey|Probe|AskQEMU|StartExplains|CheckNames|EmulatedKernelArgs|QEMUCommand'
  command -v qemu-img >/dev/null || qemu="$qemu|MacDiskIsNoImage|Share|ImageThatIsGone"
  CGO_ENABLED=1 go test -skip "^Test($qemu)" ./pkg/vm/lima ./pkg/gateway ./pkg/hostnet ./pkg/bootclock ./pkg/peercred ./pkg/attach \
    ./pkg/logfile ./pkg/notify ./pkg/secret ./pkg/guestclient ./pkg/cli/app >"$work/tests" 2>&1
  code=$?
  cat "$work/tests"
  [ "$code" = 0 ] || fail "failed: $(sed -n 's/^--- FAIL: \([^ ]*\).*/\1/p; s/^FAIL[[:space:]]\(.*\)\[.*failed\]/\1/p' "$work/tests" | tr '\n' ' ')"
  pass "the tests of $(grep -c '^ok' "$work/tests") packages passed"
}

launchd() {
  need_program
  asz serve unit --launchd --listen 127.0.0.1:8122 >"$work/serve.plist" || fail "serve unit failed"
  plutil -lint "$work/serve.plist" || fail "plutil refuses the agent"
  pass "plutil accepts the agent"
}

# pkg/notify checks that this is its script.
notification() {
  osacompile -o "$work/notification.scpt" \
    -e 'on run argv' -e 'display notification (item 2 of argv) with title (item 1 of argv)' -e 'end run' || fail "osacompile refuses the script"
  pass "the script compiles; no notification was shown"
}

blocks() { df -k "$work" | awk 'NR == 2 { print $4 }'; }
clonefile() {
  mib=${MAC_CHECK_CLONE_MIB:-1024}
  dd if=/dev/zero of="$work/disk" bs=1048576 count="$mib" 2>/dev/null || fail "$mib MiB could not be written"
  sync
  before=$(blocks)
  TIMEFORMAT=%R
  took=$({ time cp -c "$work/disk" "$work/clone"; } 2>&1) || fail "cp -c failed: $(printf '%s\n' "$took" | head -n 1)"
  sync
  used=$(((before - $(blocks)) / 1024))
  rm -f "$work/disk" "$work/clone"
  [ "$used" -le $((mib / 4)) ] || fail "the clone of $mib MiB took $used MiB and $took s"
  pass "the clone of $mib MiB took $((used > 0 ? used : 0)) MiB and $took s"
}

# With VMs. Each function needs the first session.

opened() {
  session=$(cat "$work/session" 2>/dev/null)
  [ -n "$session" ] || skip "the first session did not open"
}

open_repo() { # NAME
  if ! { mkdir -p "$work/$1" && cd "$work/$1" && git init -q . && echo "$1" >README && git add README; } ||
    ! git -c user.name=check -c user.email=check@example.invalid -c commit.gpgsign=false commit -qm first; then
    fail "git could not make a repository"
  fi
  asz open --detach --cpus 2 --memory 2GiB --disk 20GiB .
}

open_first() {
  need_program
  name=$(open_repo one) || fail "open failed: $(asz logs one 2>&1 | tail -n 1)"
  printf '%s\n' "$name" >"$work/session"
  session=$name
  pass "$session: $(inside uname -sr)"
}

run_command() {
  opened
  out=$(inside sh -c 'echo out; exit 7')
  code=$?
  [ "$out/$code" = out/7 ] || fail "got $out and status $code, want out and 7"
  pass "exec returns the output and the status of the command"
}

mounts() {
  opened
  found=$(inside findmnt -rn -t 9p,virtiofs,fuse.sshfs,nfs,cifs)
  [ -z "$found" ] || fail "the host is mounted: $found"
  [ "$(inside uname -s)" = Linux ] || fail "the command did not run in the VM"
  pass "the guest has no file system of the host"
}

denied() {
  opened
  if inside getent ahostsv4 example.com; then fail "example.com resolves"; fi
  if inside curl -sS --max-time 10 -o /dev/null http://192.0.2.1/; then fail "192.0.2.1 answers"; fi
  asz net denied "$session" | grep example.com || fail "net denied does not list example.com"
  pass "example.com does not resolve, and net denied lists it"
}

loopback() {
  opened
  port=$(asz list --json | sed -n 's/.*"ssh": *"[^"]*:\([0-9]*\)".*/\1/p' | head -n 1)
  [ -n "$port" ] || fail "list shows no SSH port"
  # shellcheck disable=SC2016 # the guest expands it
  if inside bash -c 'gw=$(ip -4 route show default | cut -d" " -f3); timeout 10 bash -c "exec 3<>/dev/tcp/$gw/$1"' bash "$port"; then
    fail "the guest reaches port $port of the host"
  fi
  pass "port $port of the host is refused"
}

allowed() {
  opened
  code=$(inside curl -sS --max-time 60 -o /dev/null -w '%{http_code}' https://github.com/) || fail "https://github.com/ does not answer"
  address=$(inside getent ahostsv4 github.com | awk 'NR == 1 { print $1 }')
  case $address in
  198.18.* | 198.19.*) pass "github.com answers with $code, through the gateway's address $address" ;;
  *) fail "github.com has the address $address, which is not the gateway's" ;;
  esac
}

fetch_commit() {
  opened
  inside sh -c 'git switch -qc agent/check && echo agent >AGENT && git add AGENT &&
    git -c user.name=agent -c user.email=agent@example.invalid commit -qm "made inside"' || fail "the commit in the VM failed"
  if asz destroy "$session"; then fail "destroy did not refuse, and lost a commit"; fi
  (cd "$work/one" && asz fetch "$session") || fail "fetch failed"
  subject=$(git -C "$work/one" log -1 --format=%s "refs/agents/$session/heads/agent/check")
  [ "$subject" = "made inside" ] || fail "the fetched commit is: $subject"
  pass "destroy refused while the commit was only in the VM; then it was fetched"
}

checkpoint() {
  opened
  inside sh -c 'echo before >state && sync' || fail "exec failed"
  asz checkpoint "$session" check || fail "checkpoint failed"
  asz checkpoints "$session" | grep '^check ' | grep -v memory || fail "the checkpoint has memory, or is missing"
  inside sh -c 'echo after >state && sync'
  asz restore "$session" check || fail "restore failed"
  content=$(inside cat state)
  [ "$content" = before ] || fail "after restore, the file contains: $content"
  for name in check before-restore; do
    asz checkpoints "$session" --remove "$name" || fail "removing the checkpoint $name failed"
  done
  [ "$(inside cat state)" = before ] || fail "after its checkpoints were removed, the session lost the restored file"
  pass "the disk was restored, and the checkpoints were removed"
}

standby() {
  opened
  if pmset -g batt | head -n 1 | grep "'Battery Power'"; then skip "on battery power, no standby VM is started"; fi
  until asz image list --json | grep '"vm": *"standby-'; do
    asz image list | tail -n 1
    sleep 5
  done
  began=$SECONDS
  name=$(open_repo two) || fail "the second session did not open"
  took=$((SECONDS - began))
  asz list --json | grep '"from": *"pool"' || fail "the second session ($took s) was not made from the standby VM"
  asz destroy --force "$name" || fail "destroying the second session failed"
  pass "the second session took the standby VM and was ready after $took s"
}

restart() {
  opened
  began=$SECONDS
  asz stop "$session" || fail "stop failed"
  stopped=$((SECONDS - began))
  asz list --json | grep '"state": *"stopped"' || fail "list does not show the session as stopped"
  began=$SECONDS
  asz start "$session" || fail "start failed"
  inside test -e AGENT || fail "a file is missing after the start"
  pass "stopped in $stopped s, started in $((SECONDS - began)) s"
}

destroy_first() {
  opened
  asz destroy --force "$session" || fail "destroy failed"
  asz destroy --force "$session" || fail "the second destroy failed"
  # A standby VM that is still being made can be removed only afterwards.
  while :; do
    pool=0 asz image prune || fail "image prune failed"
    left=$(find "$work/vms" -mindepth 1 -maxdepth 1 ! -name '_*' 2>/dev/null; pgrep -fl "$work/vms")
    [ -n "$left" ] || pass "no directory and no process remains"
    printf 'left: %s\n' "$(printf '%s' "$left" | tr '\n' ' ')"
    sleep 5
  done
}

check "system" 10 "VMs need macOS 13 on a Mac that is not a VM; a program for Rosetta cannot start them." "README.md, Install" system
check "tools" 20 "A program is missing or too old: make setup installs it." "scripts/setup.sh" tools
check "build" 1800 "The program does not build with cgo. The first error is in bin/mac-check.log." "docs/development.md, macOS; pkg/vm/lima/hostagent.go" build
check "signature" 60 "Virtualization.framework starts no VM without this entitlement." "docs/development.md, macOS; vz.entitlements" signature
check "doctor" 60 "The host lacks what sessions need; each line of bin/mac-check.log has a hint." "pkg/vm/lima/check.go, pkg/cli/setupcmd" doctor
check "unit tests" 1800 "Code that only macOS runs is wrong, or a test assumes Linux." "files with _darwin in their name; pkg/vm/lima/vz_test.go" unit_tests
check "launchd agent" 30 "launchd would not load what serve unit --launchd prints." "pkg/server/unit.go, unit/agent-sessionizer.plist.tmpl" launchd
check "notification" 30 "Desktop notifications fail with a syntax error." "pkg/notify/notify.go" notification
check "clonefile" 120 "Disks are copied block by block: sessions, forks and checkpoints are slow and take space." "pkg/vm/lima/disks.go, clone; is the directory on APFS?" clonefile
if [ -z "$quick" ]; then
  vms=yes
  check "first session" 2400 "No VM starts, or it does not become ready." "docs/lifecycle.md; pkg/vm/lima/hostagent.go, start.go" open_first
  check "exec" 120 "The host does not reach the guest over SSH." "pkg/ssh, pkg/session/connection.go" run_command
  check "mounts of the host" 60 "The guest sees files of the host." "pkg/vm/lima/template.go, seal" mounts
  check "denied host" 120 "The guest's traffic does not go through the gateway." "pkg/vm/lima/netsockets.go, pkg/gateway/accept.go" denied
  check "loopback of the host" 60 "The guest reaches services of the host." "pkg/gateway/dial.go, pkg/hostnet/routes_darwin.go" loopback
  check "allowed host" 120 "Frames do not pass between vz and the gateway, or the gateway reaches no network." "pkg/gateway/frametransport.go, pkg/gateway/accept.go" allowed
  check "commit and fetch" 180 "The host does not get the agent's work." "pkg/repo/fetch.go, pkg/guestclient" fetch_commit
  check "checkpoint" 600 "A raw disk cannot be copied, or the VM does not boot from the copy." "pkg/vm/lima/checkpoint.go, copyDisk; restore.go" checkpoint
  check "standby VM" 2400 "Sessions start slowly, because no standby VM is prepared or taken." "pkg/golden/pool.go, pkg/session/prepare.go; the log prepare.log" standby
  check "stop and start" 300 "A session does not survive a stop." "pkg/vm/lima/stop.go, process_darwin.go" restart
  check "destroy" 300 "VMs or processes remain." "pkg/vm/lima/process.go, instance.go" destroy_first
fi

printf '\n%d passed, %d failed, %d skipped; revision %s; all output: bin/mac-check.log\n' \
  "$passed" "$failed" "$skipped" "$(git describe --always --dirty 2>/dev/null || echo unknown)"
[ "$failed" -eq 0 ]
