#!/usr/bin/env bash
# Runs when a prepared guest shuts down, and removes everything that identifies it.
set -u
rm -f /etc/ssh/ssh_host_* /etc/ssh/agent-sessionizer/* /var/lib/systemd/random-seed \
	/var/lib/docker/engine-id /var/lib/systemd/timesync/clock /etc/agent-guest/policy.json /var/lib/agent-sessionizer/seed-name
rm -rf /var/lib/systemd/network/* /var/lib/dhcp/* /var/lib/cloud /var/lib/private/systemd/network/*
[ -L /var/lib/dbus/machine-id ] || rm -f /var/lib/dbus/machine-id
: >/etc/machine-id
echo golden >/etc/hostname
sed -i '/^127\.0\.1\.1[[:space:]]/d' /etc/hosts
for home in /root /home/*; do
	rm -f "$home"/.ssh/authorized_keys "$home"/.ssh/known_hosts "$home"/.*_history "$home"/.lesshst \
		"$home"/.wget-hsts "$home"/.zcompdump-* "$home"/.lima-user-script "$home"/.sudo_as_admin_successful
	rm -rf "$home"/.npm "$home"/.cache/pip
done
find /var/log -xdev -type f -delete
rm -rf /var/log/journal/* /tmp/* /var/tmp/* /var/lib/agent-sessionizer/provision/.lock
sync
