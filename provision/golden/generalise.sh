#!/usr/bin/env bash
# Prepares a provisioned, running guest to become a golden image. Run it as root,
# then shut the guest down cleanly. Clones of the image boot in a fraction of the
# time, without cloud-init. "agent-guest seed" gives each clone its own identity, see
# pkg/guestagent.
#
# The script needs no network and can be repeated. Logins work until the shutdown,
# which removes everything that identifies the guest. Units that no longer start at
# boot stay installed.
#
# Environment as for run.sh. AGENT_SOURCE=debian is an image whose kernel the host
# loads; it gets an initrd for that, /boot/agent-sessionizer/initrd.
. "${PROVISION_DIR:=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}/lib.sh"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
etc=/etc/systemd/system
guest=/usr/local/bin/agent-guest
[ -x "$guest" ] || {
	say "$guest does not exist"
	exit 1
}

# never UNIT… prevents units from starting, if they exist.
never() {
	local u
	for u in "$@"; do
		[ ! -e "/usr/lib/systemd/system/$u" ] || ln -sfn /dev/null "$etc/$u"
	done
}

# own UNIT SED… replaces a packaged unit by an edited copy.
own() {
	local u=$1
	shift
	sed "$@" "/usr/lib/systemd/system/$u" | put 644 "$etc/$u"
}

# after EVENT UNIT… delays units until a service has started.
after() {
	local event=$1 u
	shift
	for u in "$@"; do
		[ ! -e "/usr/lib/systemd/system/$u" ] || printf '[Unit]\nAfter=%s\n' "$event" | put 644 "$etc/$u.d/golden.conf"
	done
}

say "cloud-init: off"
if [ -d /etc/cloud ]; then
	: >/etc/cloud/cloud-init.disabled
	never cloud-init-local.service cloud-init-main.service cloud-init-network.service cloud-init.service \
		cloud-config.service cloud-final.service cloud-init-hotplugd.service cloud-init-hotplugd.socket
	# Files that cloud-init created from this guest's seed disk.
	rm -rf /var/lib/cloud /etc/netplan/50-cloud-init.yaml /etc/systemd/network/10-cloud-init-*.network \
		/etc/ssh/sshd_config.d/50-cloud-init.conf /etc/udev/rules.d/70-persistent-net.rules \
		/etc/network/interfaces.d/50-cloud-init "$etc"/sshd-keygen@.service.d
fi

say "boot: replace cloud-init"
for f in "$here"/units/*; do
	put 644 "$etc/${f##*/}" <"$f"
done
put 644 /etc/systemd/network/05-agent.network <"$here/card.network"
"$guest" unit | put 644 "$etc/agent-guest.service"
mkdir -p "$etc/sysinit.target.wants" "$etc/agent-guest.service.d"
ln -sfn "$etc/agent-seed.service" "$etc/sysinit.target.wants/agent-seed.service"
ln -sfn "$etc/agent-login.service" "$etc/sysinit.target.wants/agent-login.service"
ln -sfn "$etc/agent-guest.service" "$etc/sysinit.target.wants/agent-guest.service"

say "boot: start what a login needs first"
# The seed has closed the network and made the key before sshd starts.
if [ -e "$etc/multi-user.target.wants/ssh.service" ]; then
	own ssh.service -e '/^After=/s/=.*/=agent-seed.service\nDefaultDependencies=no\nConflicts=shutdown.target\nBefore=shutdown.target/' \
		-e '/^ExecStartPre=/d'
	never sshd-keygen.service
fi
# The seed has loaded the firewall rules, and the network card is down until the seed
# brings it up. The daemon may therefore load its own rules after the first login.
put 644 "$etc/agent-guest.service.d/golden.conf" <<'X'
[Unit]
After=agent-seed.service ssh.service
X
own systemd-networkd.service -e '/^After=/s/ network-pre.target//'
# Where netplan configures the network, only its generator enables networkd, and what it
# generates from is gone.
ln -sfn "$etc/systemd-networkd.service" "$etc/multi-user.target.wants/systemd-networkd.service"
# These units would delay the first login, so they start after it.
after agent-login.service systemd-tmpfiles-setup.service systemd-resolved.service systemd-logind.service systemd-user-sessions.service dbus.service
if [ "$AGENT_SOURCE" = debian ]; then
	# Our initrd has mounted the root file system for writing and has loaded the
	# modules that the seed needs. udev sees the card without a trigger. The other
	# devices, and device nodes without a loaded driver, can wait.
	own systemd-udev-trigger.service -e '/^Before=/d'
	ln -sfn /dev/null "$etc/sysinit.target.wants/systemd-udev-trigger.service"
	for u in systemd-tmpfiles-setup-dev-early.service systemd-tmpfiles-setup-dev.service; do
		own "$u" -e '/^Before=/s/ systemd-udevd.service//'
	done
	after agent-login.service kmod-static-nodes.service systemd-tmpfiles-setup-dev-early.service systemd-tmpfiles-setup-dev.service
	after ssh.service systemd-remount-fs.service # the daemon starts after it
else
	put 644 "$etc/agent-seed.service.d/golden.conf" <<'X'
[Unit]
After=systemd-remount-fs.service
X
fi
# Logins before the end of the boot are allowed.
ln -sfn /dev/null /etc/tmpfiles.d/systemd-nologin.conf

say "boot: disable units that have no work"
never systemd-random-seed.service systemd-udev-load-credentials.service \
	systemd-networkd-persistent-storage.service systemd-journal-flush.service systemd-hibernate-clear.service \
	systemd-fsck-root.service ldconfig.service
mkdir -p /etc/systemd/system-generators
for g in cloud-init-generator systemd-bless-boot-generator systemd-cryptsetup-generator systemd-debug-generator \
	systemd-factory-reset-generator systemd-getty-generator systemd-gpt-auto-generator \
	systemd-hibernate-resume-generator systemd-import-generator systemd-integritysetup-generator \
	systemd-rc-local-generator systemd-run-generator systemd-ssh-generator systemd-system-update-generator \
	systemd-tpm2-generator systemd-veritysetup-generator; do
	[ ! -e "/usr/lib/systemd/system-generators/$g" ] || ln -sfn /dev/null "/etc/systemd/system-generators/$g"
done
if [ "$AGENT_SOURCE" = debian ]; then
	# The kernel mounts the disk with these options. Without them, a second file
	# system check would wait for a device that udev has not seen yet.
	echo '/dev/vda / ext4 rw,noatime,discard,errors=remount-ro 0 0' | put 644 /etc/fstab
	say "boot: build the initrd"
	bash "$here/initrd.sh" /boot/agent-sessionizer/initrd
fi

say "identity: removed at shutdown"
put 755 /run/agent-forget <"$here/forget.sh"
mkdir -p /run/systemd/system
# The unit is in /run, so no clone has it. It stops last, because other units save
# their state when they stop.
put 644 /run/systemd/system/agent-forget.service <<'X'
[Unit]
Description=Remove the identity of this guest
Before=systemd-random-seed.service systemd-journald.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=/bin/bash /run/agent-forget
TimeoutStopSec=5min
X
quiet systemctl daemon-reload
quiet systemctl start agent-forget.service

say "disk: trim"
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /tmp/* /var/tmp/*
# Make these newer than /usr, or a boot rebuilds caches that are up to date.
touch /etc/.updated /var/.updated
sync
fstrim / || true
