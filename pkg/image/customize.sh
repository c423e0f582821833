#!/bin/sh
# mmdebstrap's customize hook: $1 is the root file system. Next to this script are
# provision/, agent-guest and, if the host needs one, ca.pem. At the end the script
# removes from $1 what belongs only to this build (registry, proxy, CA, resolver).
set -eu
root=$1
in=$(cd "$(dirname "$0")" && pwd)
work=/var/tmp/agent-build

mkdir -p "$root$work"
cp -r "$in/provision" "$root$work/"
install -m 755 "$in/agent-guest" "$root/usr/local/bin/agent-guest"
rm -f "$root/etc/resolv.conf"
cat /etc/resolv.conf >"$root/etc/resolv.conf"
if [ -s "$in/ca.pem" ]; then
	cp "$in/ca.pem" "$root$work/ca.pem"
	export NODE_EXTRA_CA_CERTS="$work/ca.pem" NPM_CONFIG_CAFILE="$work/ca.pem" CURL_CA_BUNDLE="$work/ca.pem"
else
	unset NODE_EXTRA_CA_CERTS NPM_CONFIG_CAFILE CURL_CA_BUNDLE
fi
# Maintainer scripts must not start daemons in a chroot.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"

TMPDIR=/tmp PROVISION_LOG=$work/log chroot "$root" bash "$work/provision/run.sh"

rm -f "$root/usr/sbin/policy-rc.d"
chroot "$root" apt-get clean
rm -rf "$root$work" "$root"/root/.npm "$root"/home/*/.npm "$root"/var/log/* \
	"$root"/var/cache/debconf/*-old "$root"/var/lib/agent-sessionizer/provision/.lock
# Not /tmp and apt's lists: mmdebstrap clears them itself, and until then keeps in
# /tmp the configuration without which its apt would work on the host's lists.

# The first boot creates the identity.
rm -f "$root"/etc/ssh/ssh_host_* "$root/var/lib/dbus/machine-id" "$root/var/lib/systemd/random-seed"
: >"$root/etc/machine-id"
# Newer than /usr: otherwise the first boot rebuilds caches that are up to date.
touch "$root/etc/.updated" "$root/var/.updated"
echo agent >"$root/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
echo 'LABEL=cloudimg-rootfs / ext4 rw,noatime,discard,errors=remount-ro 0 1' >"$root/etc/fstab"
# Leave the package sources as mmdebstrap wrote them: Debian's own, with updates and
# security, unless the build uses another mirror.
ln -sfn ../run/systemd/resolve/stub-resolv.conf "$root/etc/resolv.conf"
