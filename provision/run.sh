#!/usr/bin/env bash
# Runs the provision steps that are not done yet, in order, as root in the guest or
# in a chroot of it. It works in the same way on a running VM and in an image build.
#
#   run.sh [STEP…]        only these steps
#
# Environment: AGENT_USER, AGENT_SOURCE (ubuntu|debian), IN_CHROOT (1 in a
# chroot), AGENT_BROWSER (1|0: libraries for Playwright). stdout has lines "step NAME
# start|skip|done|failed SECONDS", with the steps' own lines between them.
#
# A step's stamp is the hash that pkg/image.Steps computes on the host: sha256
# over the lines "SHA256  PATH" (as sha256sum prints them) of the script, lib.sh,
# versions.env and everything in files/, by path in C order.
set -uo pipefail

PROVISION_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${PROVISION_STAMPS:=/var/lib/agent-sessionizer/provision}"
: "${PROVISION_LOG:=/var/log/agent-provision.log}"
export PROVISION_DIR PROVISION_LOG

hash_of() {
	(
		cd "$PROVISION_DIR" || exit 1
		{
			printf '%s\n' "$1" lib.sh versions.env
			find files -type f
		} | LC_ALL=C sort | tr '\n' '\0' | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
	)
}

wanted() {
	[ "$#" -gt 1 ] || return 0
	local name=$1 w
	shift
	for w; do [ "$w" != "$name" ] || return 0; done
	return 1
}

mkdir -p "$PROVISION_STAMPS" "${PROVISION_LOG%/*}" || exit 1
# Allow one run at a time: two runs would compete for dpkg.
exec 9>"$PROVISION_STAMPS/.lock"
flock 9 || exit 1

for script in "$PROVISION_DIR"/[0-9][0-9]-*.sh; do
	file=${script##*/}
	name=${file%.sh}
	wanted "$name" "$@" || continue
	hash=$(hash_of "$file")
	[ -n "$hash" ] || exit 1
	stamp=$PROVISION_STAMPS/$name
	if [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ]; then
		echo "step $name skip 0"
		continue
	fi
	echo "step $name start 0"
	begin=$SECONDS
	printf '== %s\n' "$name" >>"$PROVISION_LOG"
	# Close the lock's descriptor, or a daemon that a step starts would keep it.
	bash "$script" </dev/null 2>&1 9>&-
	code=$?
	took=$((SECONDS - begin))
	case $code in
	0)
		printf '%s\n' "$hash" >"$stamp.new" && mv -f "$stamp.new" "$stamp" || exit 1
		echo "step $name done $took"
		;;
	100) echo "step $name skip $took" ;;
	*)
		echo "last lines of $PROVISION_LOG:"
		tail -n 20 "$PROVISION_LOG"
		echo "step $name failed $took"
		exit 1
		;;
	esac
done
