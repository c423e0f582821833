#!/usr/bin/env bash
# Demonstrates the program on this repository: a VM for an agent, what the agent can
# and cannot reach, a secret that it uses and never has, a fetched commit, and a
# complete cleanup. KEEP=1 attaches you instead of cleaning up. The demo has its own
# settings and state; the image is kept for later.
set -euo pipefail
cd "$(dirname "$0")/.."

asz=$PWD/bin/agent-sessionizer
demo=$(mktemp -d "${TMPDIR:-/tmp}/asz-demo.XXXXXX")
export XDG_CONFIG_HOME=$demo/config AGENT_SESSIONIZER_IMAGE=debian
keep=
[ -z "${KEEP:-}" ] || { [ -t 0 ] && [ -t 1 ] && keep=yes; }
if [ -z "$keep" ]; then
  export XDG_STATE_HOME=$demo/state XDG_CACHE_HOME=$demo/cache AGENT_SESSIONIZER_LIMA_HOME=$demo/vms
  # The demo needs no preparation for a next session.
  export AGENT_SESSIONIZER_PREPARE=none
fi
session=
host=

bold() { printf '\n\033[1m%s\033[0m\n' "$*"; }
proof() { printf '  %-34s %s\n' "$1" "$2"; }
die() {
  printf 'demo: %s\n' "$*" >&2
  exit 1
}
inside() { "$asz" exec "$session" -- "$@"; }

cleanup() {
  code=$?
  trap - EXIT
  [ -z "$session" ] || "$asz" destroy --force "$session" >/dev/null 2>&1 || true
  [ -z "$host" ] || kill "$host" 2>/dev/null || true
  [ -z "$session" ] || git for-each-ref --format='delete %(refname)' "refs/agents/$session/" | git update-ref --stdin
  rm -rf "$demo"
  exit "$code"
}
trap cleanup EXIT

mkdir -p "$XDG_CONFIG_HOME/agent-sessionizer"
DEMO_TOKEN=demo-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export DEMO_TOKEN
cat >"$XDG_CONFIG_HOME/agent-sessionizer/config.yaml" <<'YAML'
image: debian
secrets:
  DEMO_TOKEN: {from: "env:DEMO_TOKEN", to: [demo.example], like: demo-}
network:
  allow: [demo.example]
YAML

bold "1. Build a guest image from Debian packages (takes some minutes the first time)"
"$asz" image build --from debian

bold "2. Open a session on this repository"
# The host that the secret is bound to, with a certificate of its own.
go build -o "$demo/demohost" scripts/demohost.go
"$demo/demohost" "$demo/demohost.crt" >"$demo/proxy" &
host=$!
for _ in $(seq 100); do [ ! -s "$demo/proxy" ] || break; sleep 0.1; done
for roots in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
  if [ -r "$roots" ]; then
    cat "$roots" "$demo/demohost.crt" >"$demo/roots.crt"
    break
  fi
done
HTTPS_PROXY=$(cat "$demo/proxy")
SSL_CERT_FILE=$demo/roots.crt
export HTTPS_PROXY SSL_CERT_FILE
session=$("$asz" open --detach --cpus 2 --memory 2GiB --disk 10GiB .)
[ -n "$session" ] || die "the session did not open"

bold "3. Check the isolation"
proof "kernel of the host" "$(uname -r)"
proof "kernel of the VM" "$(inside uname -r)"
mounts=$(inside findmnt -rn -t 9p,virtiofs,fuse.sshfs,nfs,cifs || true)
[ -z "$mounts" ] || die "the host is mounted: $mounts"
proof "file systems of the host in the VM" "none"

allowed=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | sed -nE 's#^[^\#]*https?://([^/ ]+)/.*#\1#p' | grep -E '\.(debian\.org|ubuntu\.com)$' | head -n 1 || true)
allowed=${allowed:-github.com}
proof "allowed name $allowed" "$(inside getent ahostsv4 "$allowed" | awk 'NR == 1 { print $1 }')"
if inside getent ahostsv4 example.com >/dev/null; then die "example.com resolves"; fi
proof "denied name example.com" "does not resolve"
"$asz" net denied "$session" 2>/dev/null | sed 's/^/    /'

# The host's loopback, as seen from the guest. The port of our own SSH connection is
# certainly open.
port=$("$asz" list --json | jq -r '.[0].ssh | split(":")[1]')
if inside bash -c 'gw=$(ip -4 route show default | cut -d" " -f3); timeout 10 bash -c "exec 3<>/dev/tcp/$gw/$1"' bash "$port" 2>/dev/null; then
  die "the guest reaches the host's port $port"
fi
proof "the host's port $port" "refused"

hash() { sha256sum | cut -c1-16; }
want=$(printf %s "$DEMO_TOKEN" | hash)
has=$(inside sh -c 'printf %s "$DEMO_TOKEN"')
[ -n "$has" ] && [ "$(printf %s "$has" | hash)" != "$want" ] || die "the guest has the secret, or no placeholder"
proof "secret in the agent's shell" "a placeholder: $has"
if [ "$(uname)" = Linux ]; then # elsewhere, a certificate cannot be trusted for one process only
  got=$(inside sh -c 'curl -sS -H "Authorization: Bearer $DEMO_TOKEN" https://demo.example/')
  [ "$got" = "$want" ] || die "demo.example got $got instead of the secret"
  proof "what demo.example got" "the secret (SHA-256 $got…)"
fi
# Texts in the guest that look like the secret. They include the placeholder, and may include one in a file of
# the repository, such as a picture of this demo.
found=$(inside sudo sh -c 'cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -aoE "demo-[0-9A-Za-z]{30,}"
  grep -rahoE "demo-[0-9A-Za-z]{30,}" /run /tmp /home /root /etc /var/log 2>/dev/null' | sort -u)
[[ $found == *"$has"* ]] || die "a search of the guest does not find the placeholder"
[[ $found != *"$DEMO_TOKEN"* ]] || die "the guest has the secret"
proof "in the guest's processes and files" "only the placeholder"
inside sync
vms=$("$asz" config path | awk '$1 == "LIMA_HOME" { print $2 }')
state=$("$asz" config path | awk '$1 == "state" { print $2 }')
if found=$(grep -rlaF -- "$DEMO_TOKEN" "$vms" "$state" "$demo"); then die "the secret is on disk: $found"; fi
proof "secret in the VM's disk, state, logs" "no ($(du -shc "$vms" "$state" | tail -n 1 | cut -f1) searched)"
proof "tmux windows" "$(inside tmux list-windows -t agent -F '#W' | paste -sd' ')"
proof "Claude Code" "$(inside claude --version 2>/dev/null || echo missing)"

bold "4. Commit as an agent would, and fetch the work with git"
inside sh -c 'git switch -qc agent/demo && echo "written in the VM" >AGENT_WAS_HERE && git add AGENT_WAS_HERE &&
  git -c user.name=agent -c user.email=agent@example.invalid commit -qm "A commit made inside"'
if "$asz" destroy "$session" 2>/dev/null; then die "destroy lost unfetched work"; fi
proof "destroy with unfetched work" "refused"
"$asz" fetch "$session" | sed 's/^/    /'
git log -1 --format='    %h %an: %s' "refs/agents/$session/heads/agent/demo"

if [ -n "$keep" ]; then
  bold "5. Attach: prefix d detaches, prefix D destroys; to return: bin/agent-sessionizer open ."
  trap - EXIT
  "$asz" open "$session" || true
  rm -rf "$demo"
  exit 0
fi

bold "5. Destroy the session and check that nothing is left"
name=$session
"$asz" destroy "$name"
"$asz" destroy "$name" # the second call succeeds too
left=$(find "$vms" -mindepth 1 -maxdepth 1 ! -name '_*' | wc -l)
[ "$left" = 0 ] || die "VM directories are left in $vms"
if pgrep -f "$vms" >/dev/null; then die "processes are left: $(pgrep -af "$vms")"; fi
proof "VMs, processes" "0"
proof "sessions" "$("$asz" list --json | jq length)"
bold "demo: ok"
