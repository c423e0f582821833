# Functions of the provision scripts. Source this file; do not run it.
#
# stdout is for short progress lines that the host shows. The output of package
# managers goes to $PROVISION_LOG. If a step fails, run.sh prints the end of that log.
# shellcheck shell=bash

set -euo pipefail

: "${AGENT_USER:=agent}" "${AGENT_SOURCE:=ubuntu}" "${IN_CHROOT:=0}"
: "${PROVISION_DIR:?}" "${PROVISION_LOG:=/var/log/agent-provision.log}"

# Set these, because the umask and locale of a host or chroot can differ.
umask 022
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a HOME=/root

# shellcheck source=/dev/null
. "$PROVISION_DIR/versions.env"

say() { printf '%s\n' "$*"; }

# not_wanted ends a step that does not apply. run.sh reports it as skipped and writes
# no stamp, so the step runs as soon as it applies.
not_wanted() {
	say "$*"
	exit 100
}

quiet() { "$@" </dev/null >>"$PROVISION_LOG" 2>&1; }

# retry runs a command up to four times, 3, 6 and 12 seconds apart.
retry() {
	local pause=3
	until "$@"; do
		[ "$pause" -le 12 ] || return 1
		say "retrying in ${pause}s: $1 ${2-}"
		sleep "$pause"
		pause=$((pause * 2))
	done
}

# On a fresh cloud VM cloud-init or a timer may hold dpkg's lock for a minute.
apt_get() {
	quiet apt-get -y -q -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 \
		-o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-confold "$@"
}

# apt_update refreshes the lists unless another step did so within the hour.
apt_update() {
	[ -z "$(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -mmin -60 -print -quit 2>/dev/null)" ] || return 0
	say "refreshing package lists"
	retry apt_get update
}

apt_install() {
	apt_update
	retry apt_get install --no-install-recommends "$@"
}

# apt_has checks whether the distribution has a package. It needs fresh package lists.
apt_has() { [ -n "$(apt-cache madison "$1" 2>/dev/null)" ]; }

npm_global() {
	retry quiet npm install --global --prefix /usr/local --no-fund --no-audit --no-update-notifier "$@"
}

# unit enables, and outside a chroot also starts, systemd units.
unit() {
	if [ "$IN_CHROOT" = 1 ]; then quiet systemctl enable "$@"; else quiet systemctl enable --now "$@"; fi
}

# mask masks and stops those units that exist, with one reload of systemd for all.
mask() {
	local u found=()
	for u in "$@"; do
		[ -z "$(find /etc/systemd/system /lib/systemd/system /usr/lib/systemd/system -maxdepth 1 -name "$u" -print -quit 2>/dev/null)" ] || found+=("$u")
	done
	[ ${#found[@]} -gt 0 ] || return 0
	quiet systemctl mask "${found[@]}"
	[ "$IN_CHROOT" = 1 ] || quiet systemctl stop "${found[@]}" || true
}

# put MODE FILE writes stdin to a file, by rename.
put() {
	local mode=$1 path=$2
	mkdir -p "${path%/*}"
	cat >"$path.new"
	chmod "$mode" "$path.new"
	mv -f "$path.new" "$path"
}
